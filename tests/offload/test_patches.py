"""What the package replaces in torch and other packages: what docs/patches.md lists, and not after its last use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nvme_ops.base.patches import Patch
from nvme_ops.integrations.transformers import install, installed, uninstall
from tests.conftest import REPOSITORY, run_python


class Victim:
    """Has a method that is replaced."""

    def method(self) -> list[str]:
        return ["own"]


def wrapped(name: str) -> Any:
    def replacement(original: Any) -> Any:
        return lambda self: [name, *original(self)]

    return replacement


def test_a_method_is_replaced_from_the_first_user_to_the_last() -> None:
    before, patch = Victim.__dict__["method"], Patch(Victim, "method", wrapped("ours"))
    first, second = patch.take(), patch.take()
    for _ in range(2):
        first()
    assert Victim().method() == ["ours", "own"]
    second()
    assert Victim.__dict__["method"] is before


def test_what_somebody_else_has_replaced_since_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = Patch(Victim, "method", wrapped("ours"))
    leave = patch.take()
    theirs = wrapped("theirs")(Victim.__dict__["method"])
    monkeypatch.setattr(Victim, "method", theirs)
    for _ in range(3):
        leave()
        assert Victim.__dict__["method"] is theirs
        assert Victim().method() == ["theirs", "ours", "own"]
        leave = patch.take()
        assert Victim().method()[0] == "ours"
    leave()


def test_what_is_inherited_is_inherited_again_afterwards() -> None:
    class Base:
        def method(self) -> list[str]:
            return ["own"]

    class Heir(Base):
        pass

    leave = Patch(Heir, "method", wrapped("ours")).take()
    assert (Heir().method(), Base().method()) == (["ours", "own"], ["own"])
    leave()
    assert "method" not in vars(Heir)
    leave = Patch(one := Base(), "method", lambda own: lambda: ["ours", *own()]).take()
    assert (one.method(), Base().method()) == (["ours", "own"], ["own"])
    leave()
    assert not vars(one)


def test_transformers_stays_installed_as_long_as_somebody_needs_it() -> None:
    """A block that ended, such as a trainer's, uninstalled what another one, or `install()` in it, had asked for."""
    modeling: Any = pytest.importorskip("transformers.modeling_utils")
    before = modeling.safe_open, modeling.safe_save_file
    first, second = installed(), installed()
    first.__enter__()
    assert modeling.safe_open is not before[0]
    second.__enter__()
    first.__exit__(None, None, None)
    assert modeling.safe_open is not before[0]
    install()
    install()
    second.__exit__(None, None, None)
    assert modeling.safe_save_file is not before[1]
    with installed():
        uninstall()
        assert modeling.safe_open is not before[0]
    assert (modeling.safe_open, modeling.safe_save_file) == before


# The page

PAGE = (REPOSITORY / "docs" / "patches.md").read_text().split("## In your own objects")[0]
ROWS = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| ")][2:]


def test_the_page_names_what_is_replaced_and_all_of_it_is_restored(folder: Path) -> None:
    for name in ("transformers", "accelerate", "safetensors"):
        pytest.importorskip(name)
    program = """
        import gc, json, sys
        import accelerate, safetensors.torch, torch, transformers
        from transformers import Trainer, modeling_utils
        from torch.optim.optimizer import _global_optimizer_pre_hooks
        from nvme_ops.integrations import trainer, transformers as ours
        from nvme_ops.offload import NvmeOptimizer, save_on_nvme, stream_weights, swap_gradients, swap_params

        def name(owner, attribute):
            if isinstance(owner, type):
                return f"{owner.__module__}.{owner.__qualname__}.{attribute}"
            return f"{owner.__name__}.{attribute}"

        def seen():
            found = {}
            for title, module in list(sys.modules.items()):
                if title.split(".")[0] not in ("torch", "transformers", "safetensors", "accelerate", "peft"):
                    continue
                for key, value in list(vars(module).items()):
                    if callable(value):
                        found[name(module, key)] = value
                    if isinstance(value, type) and value.__module__ == title:
                        own = [(at, one) for at, one in vars(value).items() if hasattr(one, "__get__")]
                        found.update({name(value, at): one for at, one in own})
            return found

        class Own(Trainer):
            def _save_optimizer_and_scheduler(self, folder):
                super()._save_optimizer_and_scheduler(folder)

            def _load_optimizer_and_scheduler(self, folder):
                super()._load_optimizer_and_scheduler(folder)

        def layers():
            return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))

        before, changed = seen(), set()

        def compare():
            now = seen()
            changed.update(each for each, value in before.items() if now.get(each) is not value)

        def use(each):
            model = layers()
            first = stream_weights(layers(), each, memory_budget="1M")
            swapped = swap_params(model, each, memory_budget="1M", min_bytes=1)
            gradients = swap_gradients(model.parameters(), each, min_bytes=1)
            optimizer = NvmeOptimizer(model.parameters(), torch.optim.AdamW, each, overlap="backward", lr=1.0)
            ours.install()
            mine = object.__new__(Own)
            trainer._instead_of_base(mine, mine._save_optimizer_and_scheduler, lambda _: compare(), "")
            trainer._instead_of_base(mine, mine._load_optimizer_and_scheduler, lambda _: compare(), "")
            with save_on_nvme(each), first:
                first(torch.ones(1, 256))
                compare()
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            swapped.restore()
            for opened in (optimizer, gradients, swapped):
                opened.close()
            ours.uninstall()

        use(sys.argv[1])
        gc.collect()
        during = sorted(changed)
        changed.clear()
        compare()
        rows = {}
        for row in json.loads(sys.argv[2]):
            owner, _, attribute = row.rpartition(".")
            parts, found = owner.split("."), sys.modules[owner.split(".")[0]]
            for part in parts[1:]:
                found = getattr(found, part)
            rows[name(found, attribute)] = row
        hooks = [*_global_optimizer_pre_hooks]
        print(json.dumps([during, sorted(rows), sorted(changed), hooks]))
    """
    named = [match for row in ROWS for match in re.findall(r"`((?:torch|transformers)\.[\w.]+)`", row[0])]
    done = run_python(program, folder, json.dumps(named))
    during, page, after, hooks = json.loads(done.stdout.splitlines()[-1])
    assert during == page
    assert after == hooks == []
