"""use_nvme: Trainers of transformers and TRL end with the same bits, and their logs say what went to storage."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import nvme_ops
from nvme_ops.offload import NvmeOptimizer
from tests.launch import run_ranks
from tests.offload.training import equal, values

transformers: Any = pytest.importorskip("transformers")
accelerate: Any = pytest.importorskip("accelerate")

from nvme_ops.integrations.trainer import use_nvme  # noqa: E402
from nvme_ops.integrations.transformers import nvme_optimizer  # noqa: E402
from tests.offload.trainer_models import SMALL, llama, take_small_activations, trainer  # noqa: E402

# Of a version before activation_checkpointing, which works here as well.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
NAMES = [f"nvme_{what}_bytes_{way}" for what in ("optimizer", "activations") for way in ("read", "written")]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have made an accelerator."""
    for name in ("integrations.trainer", "offload.activations.save_on_nvme"):
        monkeypatch.setattr(f"nvme_ops.{name}.where_it_computes", lambda: torch.device("cpu"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    take_small_activations(monkeypatch.setattr)


@pytest.fixture
def nvme(folder: Path) -> Path:
    place = folder / "nvme"
    place.mkdir()
    return place


def train(trained: Any, **given: Any) -> Any:
    transformers.set_seed(5)  # of dropout
    return trained.train(**given)


def losses(trained: Any) -> list[tuple[int, float, float]]:
    return [(log["step"], log["loss"], log["grad_norm"]) for log in trained.state.log_history if "loss" in log]


def same(first: Any, second: Any) -> bool:
    return losses(first) == losses(second) and equal(values(first.model), values(second.model))


def moved(trained: Any) -> list[list[int]]:
    return [[log[name] for name in NAMES if name in log] for log in trained.state.log_history]


def of_trl(folder: Path) -> Any:
    """An SFTTrainer of two steps: TRL's trainers are transformers' with other losses."""
    trl, datasets, tokenizers = (pytest.importorskip(name) for name in ("trl", "datasets", "tokenizers"))
    known = {name: number for number, name in enumerate(["<pad>", "<end>", "<unk>", *(f"w{i}" for i in range(61))])}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    chosen: Any = {
        "max_steps": 2, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-3, "save_strategy": "no",
    }  # fmt: skip
    texts = [" ".join(f"w{(number + 2) * factor % 61}" for factor in range(1, 13)) for number in range(8)]
    return trl.SFTTrainer(
        model=llama(), args=trl.SFTConfig(str(folder), **chosen),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=split, **special),
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        {"optim": "adagrad", "max_grad_norm": 0.01, "lr_scheduler_type": "cosine", "eval_strategy": "steps"},
        {"optim": "sgd", "optim_args": "momentum=0.9", "gradient_accumulation_steps": 2, "max_grad_norm": 0},
        {"optim": "adamw_torch_fused", "bf16": True, "gradient_checkpointing": True},
        {"peft": True},
        {"trl": True},
    ],
    ids=lambda arguments: "-".join(arguments),
)  # fmt: skip
def test_the_bits_are_the_same_and_the_log_says_what_moved(folder: Path, nvme: Path, arguments: Any) -> None:
    def made() -> Any:
        if "trl" in arguments:
            return of_trl(folder)
        if "peft" not in arguments:
            return trainer(folder, **arguments)
        peft: Any = pytest.importorskip("peft")
        return trainer(folder, model=peft.get_peft_model(llama(), peft.LoraConfig(target_modules="all-linear")))

    plain, ours = made(), made()
    train(plain)
    use_nvme(ours, nvme, **SMALL)
    train(ours)
    assert same(ours, plain)
    assert not any(moved(plain))
    moves = moved(ours)
    assert all(all(one <= other for one, other in zip(*pair, strict=True)) for pair in itertools.pairwise(moves))
    assert min(moves[-1]) > 0
    assert list(nvme.iterdir()) == []


def unless_optimizer(function: Any) -> Any:
    """torch's, which would take the states another way, or all of them into memory."""

    def checked(*args: Any, **given: Any) -> Any:
        assert not any(str(arg).endswith("optimizer.pt") for arg in args)
        return function(*args, **given)

    return checked


def test_a_run_is_resumed_from_any_trainers_checkpoint(
    folder: Path, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(name: str, on_nvme: bool = True, **options: Any) -> Any:
        made = trainer(folder / name, save_strategy="steps", save_steps=2, optim="adamw_torch", max_steps=4)
        if on_nvme:
            use_nvme(made, nvme, **SMALL, **options)
        return made

    train(whole := begun("plain", False))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", unless_optimizer(torch.save))
        train(first := begun("ours"))
    assert same(first, whole)
    nvme_ops.load(folder / "ours" / "checkpoint-2" / "model.safetensors", verify=True)  # nvme_ops alone has checksums
    train(begun("left", checkpoints=False))
    with pytest.raises(ValueError, match="checksums"):
        nvme_ops.load(folder / "left" / "checkpoint-2" / "model.safetensors", verify=True)
    for written, on_nvme in (("ours", False), ("ours", True), ("plain", True)):
        with monkeypatch.context() as patch:
            if on_nvme:
                patch.setattr(torch, "load", unless_optimizer(torch.load))
            train(resumed := begun("resumed", on_nvme), resume_from_checkpoint=str(folder / written / "checkpoint-2"))
        assert losses(resumed) == losses(whole), (written, on_nvme)
        assert equal(values(resumed.model), values(whole.model))
    assert list(nvme.iterdir()) == []


def test_two_ranks(folder: Path, nvme: Path) -> None:
    said = run_ranks(2, "tests.offload.ranks", f"trainer {folder}")
    assert sorted(said.splitlines()) == ["rank 0: True, True", "rank 1: True, True"]
    assert list(nvme.iterdir()) == []


class Stop(transformers.TrainerCallback):
    """Raises in the second step."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            raise self.error


def test_what_is_raised_leaves_nothing_behind(folder: Path, nvme: Path) -> None:
    ours: Any = trainer(folder, callbacks=[Stop(KeyboardInterrupt)])
    own_safe_open = transformers.modeling_utils.safe_open
    use_nvme(ours, nvme, **SMALL)
    with pytest.raises(KeyboardInterrupt):
        train(ours)
    assert list(nvme.iterdir()) == []
    assert ours.optimizer is None
    assert transformers.modeling_utils.safe_open is own_safe_open
    with pytest.raises(RuntimeError, match=r"have both calls in a block, `with use_nvme\(trainer, folder\):`"):
        ours.train()


@pytest.mark.parametrize("options", [{}, {"model_init": llama}], ids=["", "model_init"])
def test_a_block_keeps_the_states_between_calls_unless_the_model_is_new(folder: Path, nvme: Path, options: Any) -> None:
    plain, ours = trainer(folder, **options), trainer(folder, **options)
    with use_nvme(ours, nvme, **SMALL):
        for _ in range(2):
            train(plain)
            train(ours)
            assert same(ours, plain)
            assert list(nvme.iterdir())
    assert list(nvme.iterdir()) == []
    assert not {"train", "log", "nvme_training"} & vars(ours).keys()


def test_an_optimizer_given_to_the_trainer_is_moved_and_comes_back(folder: Path, nvme: Path) -> None:
    def given() -> Any:
        model = llama()
        return trainer(folder, model=model, optimizers=(torch.optim.NAdam(model.parameters(), lr=0.01), None))

    plain, ours = given(), given()
    optimizer = ours.optimizer
    train(plain)
    use_nvme(ours, nvme, **SMALL)
    train(ours)
    assert same(ours, plain)
    assert (ours.optimizer, len(optimizer.state)) == (optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_an_nvme_optimizer_of_the_users_is_used_as_it_is(folder: Path, nvme: Path) -> None:
    def given(**options: Any) -> Any:
        return trainer(folder, model=model, optimizers=(optimizer, None), **options)

    model, budget = llama(), "2M"
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, nvme, memory_budget=budget) as optimizer:
        use_nvme(ours := given(), nvme, **SMALL)
        train(ours)
        assert moved(ours)[-1][:2] == [optimizer.stats().bytes_read, optimizer.stats().bytes_written]
        assert optimizer.steps == 3
    overlapped: Any = {"memory_budget": budget, "overlap": "backward"}
    with NvmeOptimizer(model.parameters(), torch.optim.AdamW, nvme, **overlapped) as optimizer:
        with pytest.raises(ValueError, match=r"updates before the trainer clips .* max_grad_norm=0"):
            use_nvme(given(), nvme)
        use_nvme(given(max_grad_norm=0), nvme).close()


def test_a_subclass_that_saves_and_loads_more_does_so(folder: Path, nvme: Path) -> None:
    seen: list[str] = []

    class More(transformers.Trainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            super()._save_optimizer_and_scheduler(output_dir)
            seen.append(f"saved {(Path(output_dir) / 'optimizer.pt').exists()}")

        def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            seen.append("loaded")

    runs = [trainer(folder, save_strategy="steps", save_steps=2, max_steps=4) for _ in range(2)]
    own = transformers.Trainer._load_optimizer_and_scheduler
    for run, begin in zip(runs, (None, str(folder / "checkpoint-2")), strict=True):
        run.__class__ = More
        use_nvme(run, nvme, **SMALL)
        train(run, resume_from_checkpoint=begin)
    assert seen == ["saved True", "saved True", "loaded", "saved True"]
    assert same(*runs)
    assert transformers.Trainer._load_optimizer_and_scheduler is own


def test_each_can_stay_in_memory(folder: Path, nvme: Path) -> None:
    ours = trainer(folder)
    use_nvme(ours, nvme, optimizer_budget=None, activations_budget=0)
    train(ours)
    assert {len(row) for row in moved(ours)} == {2}
    use_nvme(ours, nvme, activations_budget=None, optimizer_budget=None)
    train(ours)
    assert not any(moved(ours))


@pytest.mark.parametrize("budget", ["host_budget", "memory"])
def test_saved_tensors_have_the_budgets_of_save_on_nvme(folder: Path, nvme: Path, budget: str) -> None:
    given: Any = {"host_budget": 40960, "memory": nvme_ops.offload.Memory(40960)}[budget]
    with use_nvme(ours := trainer(folder), nvme, optimizer_budget=None, **{budget: given}) as using:
        train(ours)
        assert repr(using).endswith("optimizer in memory, activations 40 KiB>")
        assert min(moved(ours)[-1]) > 0


def test_callbacks_see_the_optimizer_and_the_figures(folder: Path, nvme: Path) -> None:
    seen: list[Any] = []

    class Look(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            seen.append(optimizer.optimizer)

        def on_train_end(self, *_: Any, optimizer: Any, **__: Any) -> None:
            seen.append(len(optimizer.state_dict()["state"]) > 0)

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            seen.append(set(NAMES) <= logs.keys())

    ours: Any = trainer(folder, callbacks=[Look()], max_steps=1)
    with use_nvme(ours, nvme, **SMALL):
        train(ours)
        metrics = ours.evaluate()
    assert [type(seen[0]), *seen[1:]] == [NvmeOptimizer, True, True, True, True]
    assert not any(name in metrics for name in NAMES), "default_compute_objective adds up what is there"
    assert "epoch" in metrics


def stepped(folder: Path) -> Any:
    made = trainer(folder, max_steps=1)
    made.train()
    return made


def scheduled(folder: Path) -> Any:
    optimizer = torch.optim.AdamW((model := llama()).parameters())
    return trainer(folder, model=model, optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)))


def changed(folder: Path, name: str, value: Any = True) -> Any:
    made: Any = trainer(folder)
    setattr(made if hasattr(made, name) else made.args, name, value)
    return made


@pytest.mark.parametrize(
    ("made", "given", "error", "words"),
    [
        (lambda _: llama(), {}, TypeError, "must be transformers' Trainer or a subclass of it: Llama.* has no"),
        (trainer, {"folder": "/nosuch"}, FileNotFoundError, "is a disk not mounted"),
        (trainer, {"activations_budget": 1.5}, TypeError, "activations_budget must be bytes or a size"),
        (trainer, {"device_budget": "1M"}, ValueError, "device_budget= is memory of an accelerator"),
        (trainer, {"host_budget": "1M", "activations_budget": 0}, TypeError, "host_budget= and memory_budget= are the"),
        (trainer, {"host_budget": "1M", "activations_budget": None}, TypeError, "leaves saved tensors where they are"),
        (trainer, {"checkpoints": "no"}, TypeError, "checkpoints must be a bool, not str"),
        (trainer, {"optimizer_budget": "512K"}, ValueError, "optimizer_budget must be at least 1048576 bytes"),
        (lambda folder: changed(folder, "gradient_checkpointing_kwargs", {"offload": True}), {}, ValueError,
         "{'offload': True} moves activations to the CPU: leave it out"),
        (lambda folder: changed(folder, "activation_offloading"), {}, ValueError, "moves activations to the CPU"),
        (stepped, {}, ValueError, "AdamW has made steps.* call use_nvme before the first train"),
        (scheduled, {}, ValueError, "was given a scheduler of its AdamW: give it optimizers=.optimizer, None."),
        (lambda folder: changed(folder, "is_deepspeed_enabled"), {}, ValueError, r"integrations\.deepspeed\.install"),
        (lambda folder: changed(folder, "is_fsdp_enabled"), {}, ValueError, "over ranks by FSDP .* plain torchrun"),
    ],
)  # fmt: skip
def test_mistakes_end_in_a_sentence(
    folder: Path, nvme: Path, made: Any, given: Any, error: type[Exception], words: str
) -> None:
    one = made(folder)
    with pytest.raises(error, match=words):
        use_nvme(one, **{"folder": nvme, **given})
    assert list(nvme.iterdir()) == []
    assert not {"train", "nvme_training"} & vars(one).keys()


def test_a_mistake_that_shows_when_training_begins(folder: Path, nvme: Path) -> None:
    ours = trainer(folder, optim="adafactor")
    use_nvme(ours, nvme)
    with pytest.raises(TypeError, match=r'Adafactor is not one of .* Choose optim="adamw_torch", '):
        ours.train()
    assert ours.optimizer is None
    assert list(nvme.iterdir()) == []


# NvmeOptimizer in the hands of trainers, without use_nvme


def test_a_trainer_saves_and_resumes_an_nvme_optimizer(folder: Path, nvme: Path) -> None:
    results = {}
    for name in ("plain", "ours"):
        chosen: Any = (torch.optim.AdamW, {"lr": 1e-3})
        if name == "ours":
            chosen = nvme_optimizer(torch.optim.AdamW, nvme, memory_budget="1M", lr=1e-3)
        for steps in (2, 4):
            made: Any = trainer(
                folder / name, max_steps=steps, save_strategy="steps", save_steps=2, optimizer_cls_and_kwargs=chosen
            )
            train(made, resume_from_checkpoint=steps == 4)
        results[name] = values(made.model)
    assert equal(results["ours"], results["plain"])
