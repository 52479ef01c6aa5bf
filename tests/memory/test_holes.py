"""``Holes``: what is free is handed out once, also when Ctrl-C comes in the middle."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from typing import Any

import pytest

from nvme_ops.memory import holes
from nvme_ops.memory.holes import Holes

SIZE = 64


class Interrupt:
    """Raises KeyboardInterrupt at the line of holes.py with this number, counted from now on."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != holes.__file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("line", [*range(1, 40), 10**9])
def test_nothing_is_handed_out_twice(line: int) -> None:
    chance = random.Random(line)
    free = Holes()
    free.add(0, SIZE)
    used: dict[int, int] = {}
    before = sys.gettrace()
    for _ in range(60):
        try:
            sys.settrace(Interrupt(line))
            if used and chance.random() < 0.5:
                start = chance.choice(list(used))
                free.merge(start, used.pop(start))
            elif (found := free.find(wanted := chance.randint(1, 9))) is not None:
                free.take(*found, wanted)
                used[found[0]] = wanted
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        everything = sorted([*used.items(), *free])
        assert all(one[0] + one[1] <= other[0] for one, other in pairwise(everything))
        assert free.largest == max((size for _, size in free), default=0)
        assert free.find(free.largest + 1) is None
    if line > 1000:
        assert sum(size for _, size in free) + sum(used.values()) == SIZE
