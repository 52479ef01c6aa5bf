"""Sizes, rates, shares and columns, as they are read and written; progress where there is no terminal."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from nvme_ops import offload
from nvme_ops.base import progress
from nvme_ops.base.text import (
    GIB,
    KIB,
    MIB,
    bytes_of,
    columns_text,
    fitted,
    least_words,
    parse_size,
    rate_words,
    rounded,
    share_words,
    size_words,
)


def test_sizes_are_understood_or_refused() -> None:
    sizes = {"4096": 4096, "7 B": 7, "64M": 64 * MIB, "1g": GIB, "1.5GiB": 3 * GIB // 2, "1.5kb": 1500}
    assert {text: parse_size(text) for text in sizes} == sizes
    assert [parse_size(text, zero=True) for text in ("0", "0M", "1")] == [0, 0, 1]
    for text in ("", "0", "0.5", "-1", "M", "1X", "1e3", "1 G 2", "9" * 400):
        for zero in (False, True):
            if not (zero and text == "0"):
                with pytest.raises(ValueError, match="is not a size"):
                    parse_size(text, zero=zero)


def test_an_argument_that_is_a_size() -> None:
    values = ("64M", "1 GB", 4096, torch.tensor(5))  # what has __index__ is an int
    assert [bytes_of("budget", value) for value in values] == [64 * MIB, 10**9, 4096, 5]
    assert bytes_of("budget", "0", least=0) == 0
    with pytest.raises(ValueError, match="budget must be at least 1 byte, not 0"):
        bytes_of("budget", "0")


@given(
    st.integers(1, 2**22),
    st.sampled_from([("", 1), ("K", KIB), ("mib", MIB), ("Mb", 1000**2), ("GB", 10**9), ("T", KIB**4)]),
)
def test_whole_sizes_are_exact(number: int, unit: tuple[str, int]) -> None:
    word, factor = unit
    assert parse_size(f" {number} {word} ") == number * factor


@given(st.integers(0, 9999 << 40))
@example(1404937)
@example(GIB - 1)
@example(GIB + 1)
def test_sizes_in_words_are_sizes_and_the_least_ones_suffice(size: int) -> None:
    words, least = size_words(size), parse_size(least_words(size), zero=True)
    assert re.fullmatch(r"\d+(\.\d+)? (B|KiB|MiB|GiB|TiB)", words)
    assert math.isclose(parse_size(words, zero=True), size, rel_tol=1e-3)
    assert float(words.split()[0]) < 1024 or words.endswith("TiB")
    assert least >= size
    assert math.isclose(least, size, rel_tol=2e-3)


def test_numbers_read_well() -> None:
    assert [size_words(size) for size in (0, 512, 3 * MIB // 2, 64 * GIB)] == ["0 B", "512 B", "1.5 MiB", "64 GiB"]
    assert [share_words(share) for share in (0, 0.004, 0.5, 1)] == ["0 %", "< 1 %", "50 %", "100 %"]
    assert [rate_words(rate) for rate in (12.345e9, 0.5e9, 42e6)] == ["12.3 GB/s", "0.5 GB/s", "42 MB/s"]
    rows = ((2.7129, 4, "2.713"), (41.25, 3, "41.2"), (1234.5, 3, "1234"), (0.5, 3, "0.50"))
    assert [rounded(value, digits) for value, digits, _ in rows] == [words for _, _, words in rows]


@given(st.lists(st.lists(st.text("ab ,", max_size=70), min_size=4, max_size=4), min_size=1, max_size=4))
def test_a_table_fits_a_terminal_and_loses_no_word(lines: list[list[str]]) -> None:
    text = columns_text(lines)
    assert all(len(line) <= 80 or " " not in line.strip() for line in text.splitlines())
    assert set(text.split()) >= {word for line in lines for cell in line for word in cell.split()}


def test_a_table_that_is_too_wide_goes_on_below() -> None:
    assert columns_text([["", "b", "c"], ["long", "x", ""]]) == "      b  c\nlong  x"
    row = ["a row with a name that is long", *["1.234 (1.000 - 2.000)"] * 3, ""]
    lines = [["", "GB/s (min - max)", "end to end", "/ fio best", ""], row, ["fio", "1", "2", "3", "not here: no fio"]]
    assert columns_text(lines).splitlines() == [
        "                            GB/s (min - max)       end to end",
        "a row with a name that is long",
        "                            1.234 (1.000 - 2.000)  1.234 (1.000 - 2.000)",
        "fio                         1                      2",
        "",
        "                            / fio best",
        "a row with a name that is long",
        "                            1.234 (1.000 - 2.000)",
        "fio                         3                      not here: no fio",
    ]
    assert fitted("a\n\n  b  c") == "a\n\n  b  c"
    wrapped = "  " + "word " * 14 + "word\n    word word word word word --long-flag"
    assert fitted("  " + "word " * 20 + "--long-flag") == wrapped


def test_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for told in ("", "1 of 3: part 0\n2 of 3: part 1\n3 of 3: part 2\nverify: 50 %\n"):
        with progress.progress_bar(3) as step:
            for number in range(3):
                step(f"part {number}")
        with progress.byte_bar(200, "verify") as advance:
            advance(100)
        assert capsys.readouterr().err == told
        monkeypatch.setattr(progress, "_LINE_INTERVAL", 0.0)


def test_a_table_of_statistics() -> None:
    done = offload.OptimizerStats(
        bytes_read=3 * GIB, seconds_waited=0.0301, bytes_written=6 * GIB, steps=4, seconds=61.5
    )
    assert str(done).splitlines() == [
        "bytes_read              3 GiB",
        "bytes_written           6 GiB",
        "seconds_waited          30.1 ms",
        "steps                   4",
        "seconds                 61.5 s",
        "bytes_written_per_step  1.5 GiB",
    ]
    error = offload.WindowStats(quantization_error=0.00714)
    assert str(error) == "quantization_error  0.00714"
    assert (repr(error), str(offload.WindowStats())) == ("WindowStats(quantization_error=0.00714)", "nothing yet")
