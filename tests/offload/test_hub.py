"""Models by their names on the Hub: a server in this process has them, and the cache is a folder of the test."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from nvme_ops.offload import from_pretrained
from tests.conftest import run_python

transformers: Any = pytest.importorskip("transformers")

MAIN, OLD = "1" * 40, "2" * 40
IDS = [[5, 6, 7, 8]]


class Hub(ThreadingHTTPServer):
    """Serves folders as ``org/name`` by revisions, and notes what was asked for."""

    daemon_threads = True

    def __init__(self, folders: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folders, self.asked = folders, list[str]()
        self.commits = {"main": MAIN, "old": OLD, MAIN: MAIN, OLD: OLD}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path.startswith("/api/models/org/name"):
            words = path.split("/")
            commit = self.server.commits.get(words[words.index("revision") + 1] if "revision" in words else "main")
            if commit is None:
                return self._send(404, b"", with_body, {"X-Error-Code": "RevisionNotFound"})
            names = [str(each.relative_to(self.server.folders[commit])) for each in self._files(commit)]
            if "tree" in words:
                tree = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]
                return self._send(200, json.dumps(tree).encode(), with_body, {})
            about = {"id": "org/name", "sha": commit, "siblings": [{"rfilename": name} for name in names]}
            return self._send(200, json.dumps(about).encode(), with_body, {"Content-Type": "application/json"})
        if not path.startswith("/org/name/resolve/"):
            return self._send(404, b"", with_body, {"X-Error-Code": "RepoNotFound"})
        revision, _, name = path.removeprefix("/org/name/resolve/").partition("/")
        commit = self.server.commits.get(revision)
        if commit is None:
            return self._send(404, b"", with_body, {"X-Error-Code": "RevisionNotFound"})
        file = self.server.folders[commit] / name
        if not file.is_file():
            return self._send(404, b"", with_body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        content = file.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self._send(200, content, with_body, {"X-Repo-Commit": commit, "ETag": tag})

    def _files(self, commit: str) -> list[Path]:
        return sorted(each for each in self.server.folders[commit].rglob("*") if each.is_file())

    def _send(self, status: int, content: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_attention_heads=2, num_hidden_layers=2
    )
    for name, options in ((MAIN, {"max_shard_size": "400KB"}), (OLD, {})):
        torch.manual_seed(len(options))
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name, **options)
    (folder / OLD / "part").mkdir()
    for each in ("config.json", "model.safetensors"):
        (folder / OLD / "part" / each).write_bytes((folder / OLD / each).read_bytes())
    made = Hub({name: folder / name for name in (MAIN, OLD)})
    yield made
    made.shutdown()
    made.server_close()


PROGRAM = """
import json, sys
import torch, transformers
from nvme_ops.offload import from_pretrained

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
for options in json.loads(sys.argv[1]):
    try:
        with from_pretrained("org/name", memory_budget="4M", **options) as model, torch.no_grad():
            logits = model(torch.tensor([[5, 6, 7, 8]])).logits
            assert model.name_or_path == "org/name" and model.stats().bytes_read
            print(json.dumps(logits.double().sum().item()))
    except OSError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def loaded(hub: Hub | None, cache: Path, *options: dict[str, Any]) -> list[Any]:
    """What a new process makes of the model: a number that says which it is, or an error. It asks no other server."""
    endpoint = "http://127.0.0.1:9" if hub is None else hub.endpoint
    environment: dict[str, Any] = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "0")  # whatever is set here
    environment |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
    return [json.loads(line) for line in run_python(PROGRAM, json.dumps(options), **environment).stdout.splitlines()]


def wanted(folder: Path) -> float:
    with torch.no_grad():
        logits = transformers.LlamaForCausalLM.from_pretrained(folder).eval()(torch.tensor(IDS)).logits
    return float(logits.double().sum())


def test_a_name_is_downloaded_once(hub: Hub, folder: Path) -> None:
    values = wanted(folder / MAIN)
    assert loaded(hub, folder / "cache", {}, {}) == [values, values]
    assert sum(each.endswith(f"{MAIN}/model-00001-of-00005.safetensors") for each in hub.asked) == 2  # HEAD and GET
    assert loaded(None, folder / "cache", {"local_files_only": True}, {"revision": MAIN}) == [values, values]


def test_revisions_and_parts_of_them(hub: Hub, folder: Path) -> None:
    found = loaded(hub, folder / "cache", {"revision": "old"}, {"revision": OLD, "subfolder": "part"}, {})
    assert found == [wanted(folder / OLD), wanted(folder / OLD), wanted(folder / MAIN)]


def test_what_is_not_found_is_transformers_own_error(hub: Hub, folder: Path) -> None:
    no_revision, not_here = loaded(hub, folder / "cache", {"revision": "bad"}, {"local_files_only": True})
    assert "bad is not a valid git identifier" in no_revision
    assert "couldn't find them in the cached files" in not_here


@pytest.mark.slow  # it tries again for half a minute
def test_without_a_connection_the_cache_serves(hub: Hub, folder: Path) -> None:
    (found,) = loaded(hub, folder / "cache", {})
    assert loaded(None, folder / "cache", {}) == [found]
    (said,) = loaded(None, folder / "other cache", {})
    assert "couldn't connect to" in said


def test_a_model_of_other_files_says_how_to_convert_them(hub: Hub, folder: Path) -> None:
    for each in (folder / MAIN).glob("model*"):
        each.unlink()
    (said,) = loaded(hub, folder / "cache", {})
    assert said.startswith("FileNotFoundError: org/name has no safetensors files")
    assert "nvme-checkpoint convert" in said


def test_a_path_that_does_not_exist_is_no_name(folder: Path) -> None:
    for path in (folder / "missing", str(folder / "missing"), "./missing/model"):
        with pytest.raises(FileNotFoundError):
            from_pretrained(path, memory_budget="4M")
