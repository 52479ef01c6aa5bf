"""use_nvme with TRL's trainers, which are transformers' with other losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers: Any = pytest.importorskip("transformers")
trl: Any = pytest.importorskip("trl")
datasets: Any = pytest.importorskip("datasets")
tokenizers: Any = pytest.importorskip("tokenizers")

from nvme_ops.integrations.trainer import use_nvme  # noqa: E402
from tests.offload.trainer_models import SMALL, llama, take_small_activations  # noqa: E402
from tests.offload.training import equal, values  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


def tokenizer() -> Any:
    words = {name: number for number, name in enumerate(["<pad>", "<end>", "<unk>", *(f"w{i}" for i in range(61))])}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=split, **special)


def words(number: int) -> str:
    return " ".join(f"w{number * each % 61}" for each in range(1, 13))


def made(kind: str, folder: Path, **arguments: Any) -> Any:
    """An SFTTrainer or DPOTrainer of two steps."""
    chosen: Any = {
        "max_steps": 2, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-3, "save_strategy": "no", **arguments,
    }  # fmt: skip
    columns = {"SFT": ["text"], "DPO": ["prompt", "chosen", "rejected"]}[kind]
    data = {name: [words(number + place) for number in range(8)] for place, name in enumerate(columns, 2)}
    return getattr(trl, f"{kind}Trainer")(
        model=llama(),
        **({"ref_model": llama()} if kind == "DPO" else {}),
        args=getattr(trl, f"{kind}Config")(str(folder), **chosen),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer(),
    )


@pytest.mark.parametrize("kind", ["SFT", pytest.param("DPO", marks=pytest.mark.slow)])
def test_the_bits_are_the_same(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_small_activations(monkeypatch.setattr)
    (folder / "nvme").mkdir()
    plain, ours = made(kind, folder), made(kind, folder)
    use_nvme(ours, folder / "nvme", **SMALL)
    for each in (plain, ours):
        transformers.set_seed(5)
        each.train()
    losses = [[line["loss"] for line in each.state.log_history if "loss" in line] for each in (plain, ours)]
    assert losses[0] == losses[1]
    assert equal(values(ours.model), values(plain.model))
    moved = [value for name, value in ours.state.log_history[-1].items() if name.startswith("nvme_")]
    assert len(moved) == 4
    assert min(moved) > 0
    assert list((folder / "nvme").iterdir()) == []
