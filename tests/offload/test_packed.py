"""Packed matrices: native code and torch's operations make the same values of the same bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nvme_ops.base.native import native
from nvme_ops.formats.packed import E2M1, INT4, MatrixLayout, Packed
from nvme_ops.formats.quantizing import packed_as
from tests.conftest import in_threads, run_python

FP8 = torch.float8_e4m3fn
NF4 = tuple(torch.linspace(-1, 1, 16).tolist())
LAYOUTS = {
    "mxfp4": MatrixLayout("low_first", 72, 96, 32, "e8m0", E2M1),
    "nvfp4": MatrixLayout("low_first", 72, 96, 16, "e4m3", E2M1),
    "int4": MatrixLayout("low_first", 72, 96, 24, "bfloat16", INT4),
    "int4 zeros": MatrixLayout("low_first", 70, 96, 32, "float16", INT4, 4, -8),
    "int4 rows": MatrixLayout("low_first", 72, 90, 90, "float32", INT4),
    "a short group": MatrixLayout("low_first", 67, 94, 36, "float32", INT4),
    "any table": MatrixLayout("low_first", 72, 128, 64, "float32", NF4),
    "int8": MatrixLayout("int8", 72, 96, 32, "float32"),
    "int8 zeros": MatrixLayout("biased8", 71, 50, 20, "bfloat16", None, 8, -128),
    "e4m3": MatrixLayout("e4m3", 72, 97, 97, "float32"),
    "e5m2": MatrixLayout("e5m2", 72, 100, 7, "float16"),
    "e4m3 groups": MatrixLayout("e4m3", 72, 96, 48, "bfloat16"),
    "e5m2 groups": MatrixLayout("e5m2", 72, 96, 32, "float32"),
    "int8 groups with zeros": MatrixLayout("biased8", 40, 96, 32, "float16", None, 8, -128),
    "nf4": MatrixLayout("high_first", 72, 128, 64, "float32", NF4),
    "nf4 nested": MatrixLayout("high_first", 70, 128, 16, "nested", NF4, scale_table=tuple(range(-128, 128))),
    "nf4 across rows": MatrixLayout("high_first", 1, 72 * 30, 64, "float32", NF4, width=30),
    "gptq": MatrixLayout("stacked4", 72, 144, 1, "float16", None, 4, 1, 24),
    "gptq int8": MatrixLayout("stacked8", 72, 76, 1, "bfloat16", None, 8, 1, 20),
    "gptq in any order": MatrixLayout("stacked4", 64, 600, 1, "float16", None, 4, 0, 16, True),
    "awq": MatrixLayout("even_first", 70, 144, 1, "float16", None, 4, 0, 32),
    "added": MatrixLayout("low_first", 72, 128, 32, "bfloat16", INT4, added=True),
    "added to rows": MatrixLayout("high_first", 71, 90, 90, "float32", NF4, added=True),
}


def random_bytes(layout: MatrixLayout) -> torch.Tensor:
    """All bytes may be anything but for groups of rows: infinities and NaN are among the scales and the numbers."""
    stored = torch.randint(256, (layout.nbytes,), dtype=torch.uint8)
    if layout.row_groups:
        groups = torch.randint(-(-layout.rows // layout.rows_of_scale), (layout.rows,), dtype=torch.int32)
        stored[-layout.sizes[3] :] = groups.view(torch.uint8)
    return stored


def expanded(layout: MatrixLayout, stored: torch.Tensor, dtype: torch.dtype, transposed: bool, divisor: float) -> Any:
    form = Packed([layout], [(divisor,)], None, transposed)
    out = torch.empty(form.shape(()), dtype=dtype)
    form.expand(stored, out)
    return out


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", LAYOUTS)
def test_native_values_are_those_of_torch(name: str, dtype: torch.dtype, transposed: bool, threads: int) -> None:
    torch.manual_seed(1)
    layout, before = LAYOUTS[name], torch.get_num_threads()
    transposed = transposed and not layout.width
    for divisor in (1.0, 1.7):
        stored = random_bytes(layout)
        wanted = expanded(layout, stored, torch.float64, transposed, divisor).float().to(dtype)  # by torch's operations
        torch.set_num_threads(threads)
        try:
            actual = expanded(layout, stored, dtype, transposed, divisor)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(actual.isnan(), wanted.isnan())
        assert torch.equal(actual.nan_to_num(7), wanted.nan_to_num(7))


def test_groups_of_rows_that_are_all_zero_are_none() -> None:
    torch.manual_seed(1)
    layout = LAYOUTS["gptq in any order"]
    stored = random_bytes(plain := replace(layout, row_groups=False))
    zeros = torch.zeros(layout.sizes[3], dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float64):  # by native code, and by torch's operations
        actual = expanded(layout, torch.cat([stored, zeros]), dtype, False, 1.0)
        assert torch.equal(actual.nan_to_num(7), expanded(plain, stored, dtype, False, 1.0).nan_to_num(7))


def test_parts_side_by_side_are_not_multiplied_and_others_not_joined() -> None:
    layout = LAYOUTS["mxfp4"]
    one, other = (Packed([each], [(1.0,)], None, True) for each in (layout, replace(layout, rows=64)))
    joined = Packed.concatenated([one, one], [(96, 72)] * 2, 0)
    assert joined is not None
    assert joined.shape(()) == (192, 72)
    stored, inputs = torch.cat([random_bytes(layout)] * 2), torch.randn(2, 96).bfloat16()
    assert one.product(stored, inputs, transposed=True) is not None
    assert joined.product(stored, inputs, transposed=True) is None
    assert Packed.concatenated([one, other], [(96, 72), (96, 64)], 0) is None
    assert Packed.concatenated([one, Packed([layout], [(1.0,)])], [(96, 72), (72, 96)], 0) is None


def test_a_large_matrix_is_the_same_on_several_threads_and_after_a_fork() -> None:
    code = """
import os, torch
from nvme_ops.formats.packed import E2M1, MatrixLayout, Packed
from tests.offload.test_packed import expanded, random_bytes
layout = MatrixLayout("low_first", 1000, 1024, 32, "e8m0", E2M1)
stored = random_bytes(layout)
torch.set_num_threads(1)
wanted = expanded(layout, stored, torch.bfloat16, False, 1.0).view(torch.int16)
torch.set_num_threads(2)
for _ in range(20):
    assert torch.equal(expanded(layout, stored, torch.bfloat16, False, 1.0).view(torch.int16), wanted)
if (child := os.fork()) == 0:
    made = expanded(layout, stored, torch.bfloat16, False, 1.0).view(torch.int16)
    torch.set_num_threads(1)  # torch's own threads do not exist here, and it would wait for them
    os._exit(not torch.equal(made, wanted))
assert os.waitpid(child, 0)[1] == 0
"""
    assert run_python(code).returncode == 0


def telling_bytes(layout: MatrixLayout) -> torch.Tensor:
    """Random ones, but for scales that say something and numbers without infinities and NaN."""
    stored = random_bytes(layout)
    count = -(-layout.rows // layout.rows_of_scale) * layout.groups * (1 + layout.added)
    scales = stored[layout.sizes[0] : sum(layout.sizes[:2])]
    if layout.scales == "nested":
        scales[count:] = torch.rand(-(-count // 256)).view(torch.uint8)
    else:
        dtype = {"e4m3": FP8, "e8m0": torch.uint8}.get(layout.scales) or getattr(torch, layout.scales)
        some = torch.randint(120, 130, (count,)) if layout.scales == "e8m0" else torch.rand(count)
        scales.copy_(some.to(dtype).view(torch.uint8))
    if layout.numbers.startswith("e"):
        stored[: layout.sizes[0]] &= 0xBF
    return stored


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("name", [*LAYOUTS, "wide"])
def test_products_are_those_with_the_values(name: str, tokens: int) -> None:
    torch.manual_seed(1)
    layout = LAYOUTS.get(name) or MatrixLayout("low_first", 300, 4096, 32, "e8m0", E2M1)
    layouts = [layout, replace(layout, rows=8)]
    stored = torch.cat([telling_bytes(each) for each in layouts])
    form = Packed(layouts, [(1.7, 0.5)])
    values = torch.empty(form.shape(()), dtype=torch.float64)
    form.expand(stored, values)
    for dtype in (torch.bfloat16, torch.float16):
        inputs = torch.randn(tokens, layout.shape[1]).to(dtype)
        actual = form.product(stored, inputs, transposed=False)
        if layout.width:  # rows have no groups of their own
            assert actual is None
            continue
        wanted = inputs.double() @ values.T
        assert actual is not None
        assert actual.dtype == dtype
        error = (actual.double() - wanted).abs() / (inputs.double().abs() @ values.T.abs())
        assert error[wanted.abs() < 6e4].max() < {torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    if layout.numbers == "e4m3":
        stored[0] = 0x7F
        actual = form.product(stored, inputs, transposed=False)
        assert actual is not None
        assert actual.isnan().sum(1).tolist() == [1] * tokens
    for other in (torch.randn(tokens, layout.columns), torch.randn(5, layout.columns).half(), inputs[:0]):
        assert form.product(stored, other, transposed=False) is None
    assert form.product(stored, inputs, transposed=True) is None


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["gptq", "gptq int8", "gptq in any order", "awq"])
def test_products_with_the_transposed_of_words_are_those_with_the_values(name: str, tokens: int) -> None:
    torch.manual_seed(1)
    layout = replace(LAYOUTS[name], rows_of_scale=16)
    layout = replace(layout, columns=layout.columns + -layout.columns % 8)
    layouts = [layout, replace(layout, columns=8)]
    parts = [telling_bytes(each) for each in layouts]
    for part, factor in zip(parts, (5, 1), strict=True) if layout.row_groups else ():  # any order, and as they lie
        groups = torch.arange(layout.rows, dtype=torch.int32) * factor % layout.rows // 16
        part[-4 * layout.rows :] = groups.view(torch.uint8)
    stored, form = torch.cat(parts), Packed(layouts, [(1.7, 0.5)], None, True)
    values = torch.empty(form.shape(()), dtype=torch.float64)
    form.expand(stored, values)
    for dtype in (torch.bfloat16, torch.float16):
        inputs = torch.randn(tokens, layout.rows).to(dtype)
        wanted, actual = inputs.double() @ values.T, form.product(stored, inputs, transposed=False)
        assert actual is not None
        error = (actual.double() - wanted).abs() / (inputs.double().abs() @ values.T.abs())
        assert error.max() < {torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    assert form.product(stored, torch.randn(tokens, layout.columns + 8).half(), transposed=True) is None  # a sum of two
    if layout.row_groups:
        stored[-4:] = 77
        with pytest.raises(ValueError, match="group that is not there"):
            form.product(stored, inputs, transposed=False)
    for other in (replace(layout, rows_of_scale=12), replace(layout, columns=4)):
        assert Packed([other], [(1.0,)], None, True).product(random_bytes(other), inputs, transposed=False) is None


def test_threads_make_products_at_the_same_time() -> None:
    torch.manual_seed(1)
    layout = MatrixLayout("low_first", 1024, 1024, 32, "float32", INT4)
    stored = torch.cat([random_bytes(layout)[: layout.sizes[0]], torch.rand(layout.rows * 32).view(torch.uint8)])
    form, inputs = Packed([layout], [(1.0,)]), torch.randn(4, 1024).bfloat16()
    wanted, results = form.product(stored, inputs, transposed=False), list[Any]()
    in_threads(lambda _: results.extend(form.product(stored, inputs, transposed=False) for _ in range(50)), 4)
    assert wanted is not None
    assert len(results) == 200
    assert all(torch.equal(result, wanted) for result in results)


def test_what_is_too_small_or_of_no_such_kind_is_refused() -> None:
    stored, scales, out = torch.zeros(64, dtype=torch.uint8), torch.ones(4), torch.empty(4, 32)
    matrix = ("low_first", "float32", 4, 32, 32, 1, 1.0, torch.tensor(INT4), scales, None, 0, 0, None, False, False)

    def refused(place: int, value: Any, **changes: Any) -> None:
        given = {"stored": stored, "begin": 0, "out": out, "dtype": "float32", "transposed": False, **changes}
        changed = (*matrix[:place], value, *matrix[place + 1 :])
        with pytest.raises((ValueError, TypeError)):
            native().expand(changed, *given.values(), 1)

    for place, value in (
        (0, "low"), (0, "int8"), (0, "q4_0"), (1, "float64"), (1, "none"), (2, 5), (2, 0), (3, 33), (3, 0), (4, 0),
        (4, 31), (5, 0), (7, None), (7, torch.ones(15)), (8, None), (8, scales[1:]), (9, scales[1:]), (10, 4), (10, 3),
        (13, True), (14, True),
    ):  # fmt: skip
        refused(place, value)
    for changes in (
        {"out": out[1:]}, {"out": out.half()}, {"dtype": "float64"}, {"dtype": "bfloat16"}, {"begin": 1},
        {"stored": stored[1:]}, {"begin": 1 << 60},
    ):  # fmt: skip
        refused(0, "low_first", **changes)
    for spoiled in ({5: 2}, {9: scales}, {10: 4}, {1: "e8m0"}, {0: "int8", 7: None}):  # what is added has its own rules
        changed = tuple(spoiled.get(place, value) for place, value in enumerate((*matrix[:-1], True)))
        with pytest.raises(ValueError, match="cannot be packed"):
            native().expand(changed, torch.zeros(999, dtype=torch.uint8), 0, out, "float32", False, 1)
    words = ("stacked4", "float32", 8, 8, 1, 8, 1.0, None, torch.ones(8), None, 4, 1, None, False, False)
    stored, out = torch.zeros(8 * 8 // 2 + 4 + 32, dtype=torch.uint8), torch.empty(8, 8)
    wrong: list[dict[int, Any]] = [
        {2: 4}, {3: 12}, {4: 8}, {7: torch.tensor(INT4)}, {10: 8}, {10: 0}, {1: "nested"}, {12: torch.ones(256)},
        {1: "nested", 12: torch.ones(255)}, {0: "stacked8"}, {0: "even_first", 3: 12}, {14: True},
    ]  # fmt: skip
    for spoiled in wrong:
        changed = tuple(spoiled.get(place, value) for place, value in enumerate(words))
        with pytest.raises(ValueError, match=r"packed|bytes|columns"):
            native().expand(changed, stored, 0, out, "float32", False, 1)
    ordered = (*words[:-2], True, False)
    native().expand(ordered, stored, 0, out, "float32", False, 1)
    stored[-4] = 1
    with pytest.raises(ValueError, match="group that is not there"):
        native().expand(ordered, stored, 0, out, "float32", False, 1)
    layout = MatrixLayout("stacked4", 8, 8, 1, "float32", None, 4, 1, 8, True)
    parts = torch.cat([stored[:32], torch.ones(8).view(torch.uint8), stored[32:]])
    for dtype in (torch.float32, torch.float64):  # by native code, and by torch's operations
        with pytest.raises(ValueError, match="group that is not there"):
            expanded(layout, parts, dtype, False, 1.0)
    stored, out = torch.zeros(64, dtype=torch.uint8), torch.empty(4, 32)
    with pytest.raises(TypeError, match="must be a tuple"):
        native().expand([], stored, 0, out, "float32", False, 1)
    wide = ("int8", "float32", 1, 600, 600, 1, 1.0, None, scales, None, 0, 0, None, False, False)
    numbers = torch.zeros(600, dtype=torch.int8)
    native().expand(wide, numbers, 0, torch.empty(600), "float32", False, 1)
    with pytest.raises(ValueError, match="cannot be transposed"):
        native().expand(wide, numbers, 0, torch.empty(600), "float32", True, 1)
    inputs = torch.ones(2, 32)
    native().multiply([matrix], stored, inputs, torch.empty(2, 4), "float32", 1, False)
    for given in (
        ([], stored, inputs, torch.empty(2, 4)), ([matrix, matrix], stored, inputs, torch.empty(2, 8)),
        ([matrix], stored, inputs, torch.empty(2, 5)), ([matrix], stored, inputs[:, 1:], torch.empty(2, 4)),
        ([matrix], stored, torch.ones(5, 32), torch.empty(5, 4)), ([matrix], stored, inputs[:0], torch.empty(0, 4)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"rows|bytes"):
            native().multiply(*given, "float32", 1, False)
    other = (*matrix[:3], 16, 16, *matrix[5:])
    with pytest.raises(ValueError, match="as many values"):
        native().multiply(
            [matrix, other], torch.zeros(96, dtype=torch.uint8), inputs, torch.empty(2, 8), "float32", 1, False
        )
    with pytest.raises(ValueError, match="by columns"):
        native().multiply([matrix], stored, torch.ones(2, 4), torch.empty(2, 32), "float32", 1, True)


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
@pytest.mark.parametrize("shape", [(6, 64), (3, 4, 96)])
def test_what_is_packed_here_is_the_nearest_that_there_is(kind: Any, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    weight = (torch.randn(shape) * torch.rand(*shape[:-1], 1) * 9).bfloat16()
    weight.view(-1)[:64] = 0
    weight.view(-1)[64:68] = torch.tensor([5.0, 2.5, 0.25, -6.0])  # between two numbers
    weight.view(-1)[68:96] = 1e-3
    packed = packed_as(kind, weight)
    assert packed is not None
    stored, form = packed
    assert stored.numel() == weight.numel() * (17 if kind == "mxfp4" else 18) // 32
    values = torch.empty(shape)
    form.expand(stored, values)
    groups, made = weight.float().view(-1, 32), values.view(-1, 32)
    largest = groups.abs().amax(1, keepdim=True)
    if kind == "mxfp4":  # the largest power of two below the largest value is 4 times the scale
        scale = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - 2)
        grid = torch.tensor(E2M1)
    else:
        scale, grid = (largest / 7.5).bfloat16().float(), torch.tensor(INT4)
    wanted = (groups[..., None] - grid * scale[..., None]).abs().amin(-1)
    assert torch.allclose((groups - made).abs(), wanted, atol=1e-30)
    assert packed_as(kind, torch.ones(2, 33)) is None
    assert packed_as(kind, torch.ones(1, 1, 2, 32)) is None
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="not finite"):
            packed_as(kind, torch.full((2, 32), wrong))
