"""``Memory``: weights and caches in one budget compute as they do alone, and each has what others do not need."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvme_ops.memory.tier import tier_on
from nvme_ops.offload import (
    Memory,
    NvmeCache,
    NvmeOptimizer,
    from_pretrained,
    save_on_nvme,
    stream_weights,
    swap_gradients,
    swap_params,
)
from tests.conftest import KIB, MIB, in_child, in_threads
from tests.offload.llama import saved_llama
from tests.offload.models import layers, nbytes
from tests.offload.training import Twins

CPU = torch.device("cpu")
PROMPT = torch.randint(3, 199, (4, 200), generator=torch.Generator().manual_seed(5))

pytestmark = pytest.mark.usefixtures("one_thread")


def steps(model: Any, cache: Any, tokens: int) -> list[int]:
    """The tokens that a model says, one by one, after the prompt."""
    said, inputs = list[int](), PROMPT
    with torch.no_grad():
        for _ in range(tokens):
            inputs = model(inputs, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            said += inputs.flatten().tolist()
    return said


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_llama(tmp_path_factory.mktemp("memory"))


def in_memory(llama: Path, tokens: int) -> list[int]:
    transformers: Any = pytest.importorskip("transformers")
    plain = transformers.LlamaForCausalLM.from_pretrained(llama).eval()
    return steps(plain, transformers.DynamicCache(config=plain.config), tokens)


def test_weights_give_way_to_keys_and_values_and_come_back(llama: Path, folder: Path) -> None:
    wanted, memory = in_memory(llama, 6), Memory("16M")
    with from_pretrained(llama, memory=memory) as model:
        alone = model._nvme_window.nbytes
        for _ in range(2):
            with NvmeCache(folder, memory=memory) as cache:
                assert steps(model, cache, 6) == wanted
                assert cache.stats().bytes_written == 0, "they fit if weights give way"
                assert model._nvme_window.nbytes <= alone - cache.stats().bytes_cached
                assert sum(user.share.bytes_in_use for user in memory._users) <= memory.nbytes
                grown = model._nvme_window.nbytes
                cache.crop(20 - cache.get_seq_length())
                assert model._nvme_window.nbytes > (grown + alone) / 2, "most of it comes back with the tokens"
                cache.reset()
                assert model._nvme_window.nbytes == alone
                assert steps(model, cache, 6) == wanted
            assert model._nvme_window.nbytes == alone, "they come back"
        before = model.stats().bytes_read
        model(PROMPT[:, :8])
        model(PROMPT[:, :8])
        assert model.stats().bytes_read - before < 2 * 21 * MIB - alone
    assert not memory._users


def test_a_cache_larger_than_what_weights_leave_is_written(llama: Path, folder: Path) -> None:
    wanted, memory = in_memory(llama, 4), Memory("9M")
    with from_pretrained(llama, memory=memory) as model, NvmeCache(folder, memory=memory) as cache:
        assert steps(model, cache, 4) == wanted
        assert cache.stats().bytes_written > 0
        assert model._nvme_window.nbytes >= model._nvme_window.least()


def read_in_a_pass(model: Any, inputs: torch.Tensor) -> int:
    before = model.stats().bytes_read
    with torch.no_grad():
        model(inputs)
    return int(model.stats().bytes_read - before)


def test_weights_that_have_stayed_stay_while_others_take_memory(folder: Path) -> None:
    """Else each change of what there is would have others read in their place."""
    model, inputs, memory = layers(60).eval(), torch.ones(1, 256), Memory("14M")
    wanted, size = model(inputs), nbytes(model)
    streamed: Any = stream_weights(model, folder, memory=memory)
    passes = [read_in_a_pass(streamed, inputs) for _ in range(4)]
    assert max(passes[1:]) == min(passes[1:]) < size / 4, "what stays is chosen before the first pass"
    lent, in_vain = [], 0
    for _ in range(6):
        lent.append(memory.lend(MIB // 2))
        in_vain += read_in_a_pass(streamed, inputs) - read_in_a_pass(streamed, inputs)
    assert in_vain < 3 * MIB
    assert torch.equal(streamed(inputs), wanted)


def test_tails_move_together_when_layers_have_grown(folder: Path) -> None:
    memory, grown = Memory("12M"), torch.rand(2, 4, 40, 64)
    with NvmeCache(folder, memory=memory) as cache:
        for _ in range(8):
            for number in range(6):
                keys, values = cache.update(grown, grown + 1, number)
                assert torch.equal(keys[:, :, -40:], grown)
                assert torch.equal(values[:, :, :40], grown + 1)
        pager: Any = cache._pager
        tails = sorted((layer.tail for layer in pager._layers), key=pager.share.place)
        ends = [pager.share.place(tail) + tail.nbytes for tail in tails]
        assert ends[:-1] == [pager.share.place(tail) for tail in tails[1:]]
        cache.crop(-40)  # an eighth: not so little that layers would be copied to and fro
        assert all(layer.memory.nbytes == layer.memory_needed(0) for layer in pager._layers)


def test_several_models_in_one_memory_compute_in_threads_as_alone(folder: Path) -> None:
    inputs, memory = torch.ones(2, 256), Memory("3M")
    models = [layers(6) for _ in range(3)]
    wanted = [model.eval()(inputs) for model in models]
    streamed = [stream_weights(model, folder, memory=memory) for model in models]

    def compute(number: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                assert torch.equal(streamed[number](inputs), wanted[number])

    in_threads(compute, 3)
    assert sum(model._nvme_window.share.peak for model in streamed) <= 3 * memory.nbytes
    streamed[0].close()
    streamed[1].close()
    assert streamed[2]._nvme_window.nbytes > MIB, "the last one has what the others had"
    streamed[2].close()


def test_parameters_are_trained_beside_weights_and_get_what_these_leave(folder: Path) -> None:
    torch.manual_seed(1)
    inputs, memory, frozen, plain = torch.ones(2, 256), Memory("1800K"), layers(6), layers(6)
    trained = copy.deepcopy(plain)
    weights = stream_weights(copy.deepcopy(frozen), folder, memory=memory)
    swapped = swap_params(trained, folder, memory=memory, min_bytes=1)
    for model, before in ((plain, frozen), (trained, weights)):
        for _ in range(3):
            model.zero_grad()
            model(before(inputs).detach()).square().sum().backward()
            torch.optim.SGD(model.parameters(), 0.01).step()
    users = [swapped._residents, weights._nvme_window]
    assert sum(user.share.bytes_in_use for user in users) <= memory.nbytes
    assert min(user.share.nbytes for user in users) >= 768 * KIB, "about half each"
    assert swapped.stats().bytes_written > 0
    with pytest.raises(MemoryError, match=r"does not fit what other users leave of a Memory of 1\.758 MiB"):
        swap_params(nn.Linear(650, 650), folder, memory=memory)
    weights.close()
    assert users[0].share.nbytes > 1536 * KIB, "all that they want, to a step"
    swapped.restore()
    assert not memory._users
    assert all(map(torch.equal, plain.parameters(), trained.parameters()))


def test_all_of_training_shares_one_memory(folder: Path) -> None:
    module, memory, inputs = layers(8), Memory("12M"), torch.rand(2048, 256)
    options: dict[str, Any] = {"memory": memory}
    swapped = swap_params(module, folder, min_bytes=1, **options)
    gradients = swap_gradients(module.parameters(), folder, min_bytes=1, **options)
    saving = save_on_nvme(folder, min_bytes=1, **options)
    optimizer = NvmeOptimizer(module.parameters(), torch.optim.AdamW, folder, **options)
    most = 0
    for _ in range(3):
        with saving:
            loss = module(inputs).square().sum()
        users = {user.name: user.share for user in memory._users}
        most = max(most, users["saved tensors"].bytes_in_use)
        assert sum(share.bytes_in_use for share in users.values()) <= memory.nbytes
        loss.backward()
        optimizer.step()
        module.zero_grad()
        assert users["saved tensors"].bytes_in_use == 0
        assert users["swapped parameters"].nbytes >= 2 * MIB, "they have again what they want"
    assert most > memory.nbytes / 2, "saved tensors come first"
    assert 0 < saving.stats().bytes_written < saving.stats().bytes_saved
    assert users.keys() == {"swapped parameters", "swapped gradients", "saved tensors", "an optimizer"}
    assert all(share.peak > 0 for share in users.values())
    for one in (optimizer, gradients, saving, swapped):
        one.close()
    memory.close()


@pytest.mark.parametrize("overlap", [None, "backward"])
def test_optimizers_step_as_alone_in_memory_for_a_buffer_of_each(folder: Path, overlap: Any) -> None:
    """Also while one of them waits for gradients that never come; on an accelerator: test_saved_on_host.py."""
    memory, kinds = Memory("4M"), (torch.optim.AdamW, torch.optim.Adagrad)
    given: dict[str, Any] = {"memory_budget": None, "memory": memory, "overlap": overlap}
    twins = [Twins(folder, kind, ours=given, lr=0.01) for kind in kinds]
    lent = memory.lend(memory.nbytes - 512 * KIB)

    def steps(number: int) -> None:
        for turn in range(2, 12):
            twins[number].step(turn)
        assert twins[number].apart() == ""

    for turn in range(2):
        for one in twins:
            one.backward(turn)
        for one in twins[::-1]:
            for _, optimizer in one.both():
                optimizer.step()
    in_threads(steps, 2)
    assert [one.ours.stats().peak_bytes for one in twins] == [256 * KIB] * 2
    twins[0].ours.close()
    steps(1)
    assert twins[1].ours.stats().peak_bytes == 512 * KIB, "it has what the other one had"
    twins[1].ours.close()
    del lent
    memory.close()


def test_what_training_uses_is_in_one_piece_beside_what_it_saves(folder: Path) -> None:
    """Saved tensors take memory where there is some, among parameters if need be, and must not stay there."""
    module = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(64)])
    options: dict[str, Any] = {"memory": Memory("6400K")}
    swap_params(module, folder, min_bytes=1, **options)
    swap_gradients(module.parameters(), folder, min_bytes=1, **options)
    saving = save_on_nvme(folder, min_bytes=1, **options)
    optimizer = NvmeOptimizer(module.parameters(), torch.optim.AdamW, folder, **options)
    for _ in range(3):
        with saving:
            loss = module(torch.rand(512, 128)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_is_lent_waits_for_what_others_are_writing(folder: Path) -> None:
    memory = Memory("2M")
    with torch.device("meta"):
        module = layers(8)
    with swap_params(module, folder, min_bytes=1, memory=memory):  # makes zeros, which are not written yet
        lent = memory.lend(MIB)
        with pytest.raises(ValueError, match=r"Memory of 2 MiB: swapped parameters> has no 1 MiB left beside what"):
            memory.lend(MIB)
        del lent


def test_what_is_wrong_is_said(llama: Path, folder: Path) -> None:
    memory = Memory("16M")
    both: list[dict[str, Any]] = [{}, {"memory": memory, "memory_budget": "1M"}]
    for given in both:
        with pytest.raises(TypeError, match="either memory_budget= or memory="):
            NvmeCache(folder, **given)
    with pytest.raises(ValueError, match="a quarter of memory must be at least 1 MiB, not 512 KiB"):
        NvmeOptimizer([torch.ones(9)], torch.optim.SGD, folder, memory=Memory("2M"))
    with pytest.raises(TypeError, match="memory must be a Memory, not str"):
        stream_weights(layers(2), folder, memory="16M")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nbytes"):
        Memory(100)
    with from_pretrained(llama, memory=memory) as model:
        with pytest.raises(ValueError, match="in use by streamed weights: close these first"):
            memory.close()
        with pytest.raises(ValueError, match=r"memory of cpu, and memory of meta is needed"):
            memory.share(torch.device("meta"))
        with pytest.raises(ValueError, match=r"too small: at least .* for streamed weights, .* for streamed weights"):
            stream_weights(layers(2, 1900), folder, memory=memory)
        assert model(PROMPT[:, :3]) is not None
    memory.close()
    with pytest.raises(ValueError, match="this Memory was closed"):
        NvmeCache(folder, memory=memory)


def test_a_child_makes_its_own(folder: Path) -> None:
    memory = Memory("4M")
    with stream_weights(layers(2), folder, memory=memory):

        def child() -> None:
            with pytest.raises(RuntimeError, match="the parent process's"):
                NvmeCache(folder, memory=memory)

        in_child(child)


# The tier


@pytest.fixture
def tier() -> Iterator[Any]:
    tier = tier_on(CPU, 4 * MIB)
    yield tier
    assert tier.share().bytes_in_use == 0


def test_shares_are_bounds_that_may_change_and_parts_lie_at_both_ends(tier: Any) -> None:
    one, other = tier.share(MIB), tier.share(4 * MIB)
    first, last = one.allocate(MIB), other.allocate(5000, at_end=True)
    assert last.data_ptr() + 8 * KIB == first.data_ptr() + 4 * MIB
    assert one.allocate(1) is None
    assert (one.bytes_in_use, other.bytes_in_use) == (MIB, 8 * KIB), "whole pages"
    one.nbytes = 2 * MIB
    assert one.allocate(MIB) is not None
    assert other.allocate(4 * MIB) is None
    del first
    assert one.bytes_in_use == 0
    assert one.peak == 2 * MIB


def test_parts_of_two_kinds_do_not_lie_among_each_other() -> None:
    tier = tier_on(CPU, 64 * KIB, two_ended=True)
    share: Any = tier.share()
    low: list[Any] = [share.allocate(4 * KIB) for _ in range(4)]
    high: list[Any] = [share.allocate(8 * KIB, at_end=True) for _ in range(3)]
    start, end = low[0].data_ptr(), low[0].data_ptr() + 64 * KIB
    assert [part.data_ptr() for part in high] == [end - 8 * KIB * k for k in (1, 2, 3)]
    del low[1:], high[1]  # the smallest hole is between the others
    assert share.allocate(4 * KIB).data_ptr() == start + 4 * KIB
    assert share.allocate(8 * KIB, at_end=True).data_ptr() == end - 16 * KIB
    share.at_end = True
    for boundary, inside in ((40 * KIB, [True, True]), (44 * KIB, [True, False])):  # the second begins at 40 KiB
        tier.boundary = boundary
        assert [share.is_inside(part) for part in high] == inside


def test_what_is_lent_is_given_back_to_the_system(tier: Any) -> None:
    share = tier.share()
    whole = share.allocate(4 * MIB)
    whole.fill_(7)
    start = whole.data_ptr()
    assert resident(start, 4 * MIB) == 4 * MIB
    del whole
    lent = share.lend(3 * MIB)
    assert resident(start, 4 * MIB) == MIB
    assert share.allocate(2 * MIB) is None
    assert share.lend(2 * MIB) is None
    del lent
    assert share.allocate(4 * MIB) is not None


def resident(start: int, nbytes: int) -> int:
    """Bytes of memory that the system has for a range of addresses."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        size = os.sysconf("SC_PAGE_SIZE")
        entries = os.pread(pages.fileno(), nbytes // size * 8, start // size * 8)
    return size * sum(int.from_bytes(entries[at : at + 8], "little") >> 63 for at in range(0, len(entries), 8))


def test_a_module_of_layers_has_their_values_beside_a_model_that_is_closed(folder: Path) -> None:
    memory, inputs = Memory("2M"), torch.ones(1, 256)
    model = layers(4)
    wanted = model.eval()(inputs)
    with stream_weights(nn.Sequential(*layers(3)), folder, memory=memory):
        streamed = stream_weights(model, folder, memory=memory)
    assert torch.equal(streamed(inputs), wanted)
    streamed.close()


def test_a_cache_waits_for_memory_that_others_are_about_to_give_up(folder: Path) -> None:
    """Such as weights that are being read into it when they are called off; a MemoryError was seen, once, on a disk."""
    memory = Memory("2M")
    with NvmeCache(folder, memory=memory) as cache:
        share = memory.share(torch.device("cpu"))
        share.nbytes = memory.nbytes
        held = [share.allocate(1800 << 10)]
        threading.Timer(0.3, held.clear).start()
        states = torch.zeros(2, 2, 200, 64)
        assert torch.equal(cache.update(states, states, 0)[0], states)


def test_a_memory_larger_than_the_machine_names_the_fix() -> None:
    with pytest.raises(MemoryError) as caught:
        Memory("10000T").share(torch.device("cpu"))
    assert "give less" in caught.value.__notes__[0]
