"""Sizes, rates, shares and columns: as they are read, and as they are written."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nvme_ops.text import (
    GIB,
    KIB,
    MIB,
    columns_text,
    fitted,
    parse_size,
    rate_words,
    rounded,
    share_words,
    size_words,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("7 B", 7), ("64M", 64 * MIB), ("1g", GIB), ("1.5GiB", 3 * GIB // 2), ("1.5kb", 1500)],
)
def test_sizes_are_understood(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.5", "-1", "M", "1X", "1e3", "1 G 2", pytest.param("9" * 400, id="huge")])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_zero_is_a_size_where_it_may_be() -> None:
    assert [parse_size(text, zero=True) for text in ("0", "0M", "1")] == [0, 0, 1]
    for text in ("", "0.5", "-1"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_size(text, zero=True)


def test_sizes_read_well() -> None:
    assert [size_words(size) for size in (0, 512, 3 * MIB // 2, 64 * GIB)] == ["0 B", "512 B", "1.5 MiB", "64 GiB"]


@given(
    st.integers(1, 2**22),
    st.sampled_from([("", 1), ("K", KIB), ("mib", MIB), ("Mb", 1000**2), ("GB", 10**9), ("T", KIB**4)]),
)
def test_whole_sizes_are_exact(number: int, unit: tuple[str, int]) -> None:
    word, factor = unit
    assert parse_size(f" {number} {word} ") == number * factor


@given(st.integers(1, 9999 << 40))
@example(GIB - 1)
def test_sizes_in_words_are_sizes(size: int) -> None:
    words = size_words(size)
    assert re.fullmatch(r"\d+(\.\d+)? (B|KiB|MiB|GiB|TiB)", words)
    assert math.isclose(parse_size(words), size, rel_tol=1e-3)
    assert float(words.split()[0]) < 1024 or words.endswith("TiB")


@pytest.mark.parametrize(("share", "words"), [(0, "0 %"), (0.004, "< 1 %"), (0.5, "50 %"), (1, "100 %")])
def test_a_little_is_not_nothing(share: float, words: str) -> None:
    assert share_words(share) == words


def test_rates_read_well() -> None:
    assert [rate_words(rate) for rate in (12.345e9, 0.5e9, 42e6)] == ["12.3 GB/s", "0.5 GB/s", "42 MB/s"]


@pytest.mark.parametrize(
    ("value", "digits", "words"), [(2.7129, 4, "2.713"), (41.25, 3, "41.2"), (1234.5, 3, "1234"), (0.5, 3, "0.50")]
)
def test_values_are_rounded_without_an_exponent(value: float, digits: int, words: str) -> None:
    assert rounded(value, digits) == words


def test_columns_are_as_wide_as_their_widest_cell_and_end_without_blanks() -> None:
    assert columns_text([["", "b", "c"], ["long", "x", ""]]) == "      b  c\nlong  x"


@given(st.lists(st.lists(st.text("ab ,", max_size=70), min_size=4, max_size=4), min_size=1, max_size=4))
def test_a_table_fits_a_terminal_and_loses_no_word(lines: list[list[str]]) -> None:
    text = columns_text(lines)
    assert all(len(line) <= 80 or " " not in line.strip() for line in text.splitlines())
    assert set(text.split()) >= {word for line in lines for cell in line for word in cell.split()}


def test_a_table_that_is_too_wide_goes_on_below() -> None:
    row = [
        "a row with a name that is long",
        "1.234 (1.000 - 2.000)",
        "1.234 (1.000 - 2.000)",
        "1.234 (1.000 - 2.000)",
        "",
    ]
    lines = [["", "GB/s (min - max)", "end to end", "/ fio best", ""], row, ["fio", "1", "2", "3", "not here: no fio"]]
    assert (
        columns_text(lines)
        == """\
                            GB/s (min - max)       end to end
a row with a name that is long
                            1.234 (1.000 - 2.000)  1.234 (1.000 - 2.000)
fio                         1                      2

                            / fio best
a row with a name that is long
                            1.234 (1.000 - 2.000)
fio                         3                      not here: no fio"""
    )


def test_long_lines_are_wrapped_and_short_ones_are_not() -> None:
    assert fitted("a\n\n  b  c") == "a\n\n  b  c"
    assert (
        fitted("  " + "word " * 20 + "--long-flag")
        == "  " + "word " * 14 + "word\n    word word word word word --long-flag"
    )
