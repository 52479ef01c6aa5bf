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
COMMITS = {"main": MAIN, "old": OLD, MAIN: MAIN, OLD: OLD}
PREFIX = "/org/name/resolve/"


class Hub(ThreadingHTTPServer):
    """Serves the folders of revisions as ``org/name``, and notes what was asked for."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.asked = root, list[str]()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path.startswith("/api/models/org/name/"):
            words = path.split("/")
            place = next((each for each in ("revision", "tree") if each in words), "name")
            return self._list(COMMITS.get((words[words.index(place) + 1 :] or ["main"])[0]), place == "tree")
        revision, _, name = path.removeprefix(PREFIX).partition("/")
        commit = COMMITS.get(revision)
        file = self.server.root / str(commit) / name
        if path.startswith(PREFIX) and file.is_file():
            content = file.read_bytes()
            headers = {"X-Repo-Commit": str(commit), "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            return self._send(200, content, headers)
        kind = "EntryNotFound" if commit else "RevisionNotFound" if path.startswith(PREFIX) else "RepoNotFound"
        return self._send(404, b"", {"X-Error-Code": kind, "X-Repo-Commit": str(commit)})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _list(self, commit: str | None, tree: bool) -> None:
        if commit is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        folder = self.server.root / commit
        names = [str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()]
        files: Any = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]
        about = {"id": "org/name", "sha": commit, "siblings": [{"rfilename": name} for name in names]}
        return self._send(200, json.dumps(files if tree else about).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_attention_heads=2, num_hidden_layers=2
    )
    for name, options in ((MAIN, {"max_shard_size": "400KB"}), (OLD, {}), (f"{OLD}/part", {})):
        torch.manual_seed(len(name))
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name, **options)
    made = Hub(folder)
    threading.Thread(target=made.serve_forever, daemon=True).start()
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
    endpoint = f"http://127.0.0.1:{9 if hub is None else hub.server_address[1]}"
    environment: dict[str, Any] = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environment |= dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "0")  # whatever is set here
    environment |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
    return [json.loads(line) for line in run_python(PROGRAM, json.dumps(options), **environment).stdout.splitlines()]


def wanted(folder: Path) -> float:
    with torch.no_grad():
        logits = transformers.LlamaForCausalLM.from_pretrained(folder).eval()(torch.tensor([[5, 6, 7, 8]])).logits
    return float(logits.double().sum())


def test_a_name_is_downloaded_once_by_revisions_and_parts_of_them(hub: Hub, folder: Path) -> None:
    main, old, part = (wanted(folder / each) for each in (MAIN, OLD, f"{OLD}/part"))
    asked: list[dict[str, Any]] = [{}, {}, {"revision": "old"}, {"revision": OLD, "subfolder": "part"}]
    *found, unknown, nowhere = loaded(
        hub, folder / "cache", *asked, {"revision": "bad"}, {"local_files_only": True, "cache_dir": str(folder)}
    )
    assert found == [main, main, old, part]
    assert "bad is not a valid git identifier" in unknown
    assert "couldn't find them in the cached files" in nowhere
    assert sum(each.endswith(f"{MAIN}/model-00001-of-00005.safetensors") for each in hub.asked) == 2  # HEAD and GET
    assert loaded(None, folder / "cache", {"local_files_only": True}, {"revision": MAIN}) == [main, main]


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
