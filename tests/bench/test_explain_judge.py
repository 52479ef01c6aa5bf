"""What ``nvme-bench explain`` concludes from made-up rates."""

from __future__ import annotations

import pytest

from nvme_ops.measure.judge import (
    EMPTY,
    FIO,
    GDS,
    GPU,
    KEPT,
    LANES,
    LEAST,
    LOCKED,
    NEW,
    Judgement,
    Measured,
    Variation,
    judge,
    least_difference,
)
from nvme_ops.text import KIB, MIB

SMALL, LARGE = Variation(LOCKED, "block_size", 256 * KIB), Variation(LOCKED, "block_size", 4 * MIB)
LOW, HIGH = Variation(LOCKED, "queue_depth", 32), Variation(LOCKED, "queue_depth", 512)
TWO, NEW_TWO = Variation(LOCKED, LANES, 2), Variation(NEW, LANES, 2)
VARIATIONS = (SMALL, LARGE, LOW, HIGH, TWO, NEW_TWO)
HOST_ROWS = (FIO, LOCKED, EMPTY, KEPT, NEW, *(each.name for each in VARIATIONS))
QUIET = (1.0, 1.004, 0.997)
NOISY = (1.0, 1.25, 0.8, 1.15, 0.85)


def rows(gigabytes: dict[str, float], wobble: tuple[float, ...] = QUIET) -> dict[str, list[float | None]]:
    """Rates by row, of 2 GB/s unless said; each row wobbles in another order."""
    made: dict[str, list[float | None]] = {}
    for number, name in enumerate(dict.fromkeys([*HOST_ROWS, *gigabytes])):
        turn = number % len(wobble)
        made[name] = [1e9 * gigabytes.get(name, 2.0) * factor for factor in wobble[turn:] + wobble[:turn]]
    return made


def judged(
    gigabytes: dict[str, float],
    wobble: tuple[float, ...] = QUIET,
    busy: dict[str, float] | None = None,
    reached: str = NEW,
    hindrances: tuple[tuple[str, str], ...] = (),
) -> Judgement:
    variations = (*VARIATIONS, Variation(GPU, LANES, 2))
    rates = rows(gigabytes, wobble)
    return judge(
        Measured(
            False, reached, rates, busy or {}, variations, 5e9, 1e9, 3e9, hindrances=hindrances
        )
    )  # fmt: skip


def names(judgement: Judgement) -> list[str]:
    return [finding.name for finding in judgement.findings]


def test_equal_rates_mean_that_the_device_is_the_limit() -> None:
    found = judged({})
    assert found.findings == []
    assert found.verdict == "read: the device is the limit: 2 GB/s reached, 100% of its ceiling of 2 GB/s"


def test_a_kept_tensor_that_is_faster_than_a_new_one_means_page_faults() -> None:
    found = judged({NEW: 0.8, NEW_TWO.name: 0.8, EMPTY: 0.8})
    assert names(found) == ["page faults"]
    assert found.findings[0].share == pytest.approx(1, abs=0.05)
    assert "0.8 GB/s" in found.findings[0].evidence
    assert "makes new pages at 1 GB/s" in found.findings[0].evidence
    assert found.findings[0].fix == "keep the tensor and read into it again"
    assert "40% of the ceiling of 2 GB/s; most is lost to: page faults" in found.verdict


def test_nvme_ops_empty_is_advised_where_it_was_faster() -> None:
    assert "nvme_ops.empty(...), new each time: 1.9 GB/s" in judged({NEW: 0.8, EMPTY: 1.9}).findings[0].fix


def test_page_locked_memory_that_is_faster_than_a_kept_tensor_means_copies() -> None:
    found = judged({KEPT: 1.2, NEW: 1.2, NEW_TWO.name: 1.2})
    assert names(found) == ["memory copies"]
    assert "copies 5 GB/s" in found.findings[0].evidence
    assert "new_cpu_locked_tensor" in found.findings[0].fix


def test_findings_come_in_the_order_of_what_they_cost() -> None:
    found = judged({FIO: 3.0, NEW: 1.0, KEPT: 1.3, NEW_TWO.name: 1.0, HIGH.name: 3.0})
    # seconds for each GB: 1 - 0.77 - 0.5 - 0.33
    assert names(found) == ["memory copies", "page faults", "queue depth"]
    assert [finding.share for finding in found.findings] == pytest.approx([0.404, 0.346, 0.25], abs=0.02)
    assert found.verdict.endswith("most is lost to: memory copies (40% of the gap)")


@pytest.mark.parametrize(
    ("faster", "name", "fix"),
    [
        (LARGE, "block size", "block_size=4194304"),
        (SMALL, "block size", "block_size=262144"),
        (HIGH, "queue depth", "queue_depth=512"),
        (LOW, "queue depth", "queue_depth=32"),
        (TWO, "one lane", "intra_op_parallelism=2"),
    ],
)
def test_settings_that_are_faster_than_the_default_are_advised(faster: Variation, name: str, fix: str) -> None:
    found = judged({FIO: 2.6, faster.name: 2.6})
    assert names(found) == [name]
    assert f"aio_handle({fix})" in found.findings[0].fix


def test_of_two_better_values_the_best_is_advised() -> None:
    found = judged({FIO: 4.0, SMALL.name: 3.0, LARGE.name: 4.0})
    assert [finding.fix for finding in found.findings] == [
        "aio_handle(block_size=4194304), or search all settings: nvme-tune"
    ]


def test_a_busy_core_that_a_second_lane_relieves_means_cpu() -> None:
    found = judged({FIO: 3.5, TWO.name: 3.5}, busy={LOCKED: 0.97})
    assert names(found) == ["CPU"]
    assert "97% of a core busy" in found.findings[0].evidence
    assert "intra_op_parallelism=2" in found.findings[0].fix


def test_a_busy_core_that_nothing_relieves_means_cpu_too() -> None:
    found = judged({FIO: 3.5}, busy={LOCKED: 0.97})
    assert names(found) == ["CPU"]
    assert found.findings[0].share == pytest.approx(1, abs=0.05)


def test_more_lanes_are_advised_where_an_ordinary_tensor_keeps_a_core_busy() -> None:
    found = judged({KEPT: 1.0, NEW: 1.0, NEW_TWO.name: 1.6}, busy={NEW: 0.99})
    assert names(found) == ["memory copies", "CPU"]
    assert "2 lanes reach 1.6 GB/s" in found.findings[1].evidence


def test_each_part_is_named_once() -> None:
    found = judged({FIO: 4.0, TWO.name: 4.0, NEW_TWO.name: 3.0}, busy={LOCKED: 0.97, NEW: 0.97})
    assert names(found) == ["CPU"]
    assert "intra_op_parallelism=2), or search" in found.findings[0].fix  # the one that gains more


def test_a_ceiling_that_nothing_comes_near_is_left_to_nvme_tune() -> None:
    found = judged({FIO: 4.0})
    assert names(found) == ["settings"]
    assert found.findings[0].fix == "search all: nvme-tune"


def test_what_the_system_refuses_is_named_where_the_ceiling_is_not_reached() -> None:
    refused = (("io_uring: a seccomp filter forbids it", "docker run --security-opt seccomp=..."),)
    found = judged({FIO: 4.0}, hindrances=refused)
    assert names(found) == ["what the system refuses"]
    assert "a seccomp filter" in found.findings[0].evidence
    assert found.findings[0].fix.startswith("docker run")
    assert judged({}, hindrances=refused).findings == []


def test_differences_within_the_noise_are_no_findings() -> None:
    found = judged({NEW: 1.8, KEPT: 1.9, HIGH.name: 2.1}, NOISY)
    assert found.findings == []
    assert "the device is the limit" in found.verdict
    assert found.verdict.endswith("as far as this run can tell")


def test_differences_beyond_the_noise_are_findings() -> None:
    assert names(judged({NEW: 0.5, NEW_TWO.name: 0.5}, NOISY)) == ["page faults"]


def test_a_sure_difference_that_is_of_no_use_is_no_finding() -> None:
    assert judged({FIO: 2.04, HIGH.name: 2.04}, (1.0, 1.0, 1.0)).findings == []


def test_rounds_that_disagree_are_no_finding() -> None:
    rates = rows({})
    rates[FIO] = [4e9, 1.9e9, 4e9]
    assert judge(Measured(False, NEW, rates, {}, VARIATIONS)).findings == []


def test_two_small_steps_are_told_together() -> None:
    found = judged({NEW: 1.4, NEW_TWO.name: 1.4, KEPT: 1.75}, (1.0, 1.08, 0.92))
    assert names(found) == ["page faults and memory copies"]


def test_small_steps_that_only_add_up_are_said_to() -> None:
    found = judged({NEW: 1.7, NEW_TWO.name: 1.7, KEPT: 1.85, FIO: 2.3}, (1.0, 1.06, 0.94))
    assert names(found) == ["several small parts"]


def test_a_slow_round_is_not_noise() -> None:
    assert least_difference(rows({}, (1.0, 1.0, 1.0))) == LEAST
    slow = {name: [1e9, 0.3e9, 1e9] for name in HOST_ROWS}
    assert least_difference(slow) == LEAST


def test_more_rounds_tell_smaller_differences() -> None:
    few, many = least_difference(rows({}, NOISY)), least_difference(rows({}, NOISY * 3))
    assert LEAST < many < few


def test_without_fio_the_ceiling_is_page_locked_memory() -> None:
    rates = rows({NEW: 1.0, NEW_TWO.name: 1.0})
    rates[FIO] = []
    found = judge(Measured(False, NEW, rates, {}, VARIATIONS))
    assert found.ceiling == LOCKED
    assert names(found) == ["page faults"]


def test_without_fio_the_best_setting_is_the_ceiling() -> None:
    rates = rows({HIGH.name: 3.0})
    rates[FIO] = []
    found = judge(Measured(False, NEW, rates, {}, VARIATIONS))
    assert found.ceiling == HIGH.name
    assert names(found) == ["queue depth"]


def test_a_fio_that_is_slower_than_this_package_is_not_the_ceiling() -> None:
    assert judged({FIO: 1.0}).ceiling == LOCKED
    assert judged({FIO: 1.99}).ceiling == FIO


def test_rounds_that_failed_are_left_out() -> None:
    rates = rows({NEW: 0.8, NEW_TWO.name: 0.8})
    rates[NEW][1] = rates[KEPT][0] = rates[FIO][2] = None
    assert names(judge(Measured(False, NEW, rates, {}, VARIATIONS))) == ["page faults"]


def test_writes_know_no_page_faults() -> None:
    rates = rows({KEPT: 1.0, NEW: 0.5})
    found = judge(Measured(True, KEPT, rates, {}, VARIATIONS))
    assert names(found) == ["memory copies"]
    assert found.verdict.startswith("write: 1 GB/s reached, 50%")


def test_gpu_memory_that_is_slower_than_host_memory_means_the_copy() -> None:
    found = judged({GPU: 1.0}, reached=GPU)
    assert names(found) == ["copy to the GPU"]
    assert "the copy alone 3 GB/s" in found.findings[0].evidence
    assert "nvme-report" in found.findings[0].fix


def test_what_makes_gpu_memory_faster_is_advised() -> None:
    assert judged({GPU: 1.0, GDS: 1.9}, reached=GPU).findings[0].fix == "nvme_ops.gds_handle(): 1.9 GB/s"
    lanes = Variation(GPU, LANES, 2).name
    assert judged({GPU: 1.0, lanes: 1.5}, reached=GPU).findings[0].fix == "aio_handle(intra_op_parallelism=2): 1.5 GB/s"


@pytest.mark.parametrize(("busy", "named"), [(0.84, False), (0.85, True)])
def test_a_core_is_busy_from_85_percent_on(busy: float, named: bool) -> None:
    for gigabytes, row in (
        ({FIO: 3.5}, LOCKED),
        ({FIO: 3.5, TWO.name: 3.5}, LOCKED),
        ({KEPT: 1.0, NEW: 1.0, NEW_TWO.name: 1.6}, NEW),
    ):
        assert ("CPU" in names(judged(gigabytes, busy={row: busy}))) is named


def test_a_busy_core_does_not_explain_what_another_depth_makes_faster() -> None:
    assert names(judged({FIO: 2.6, HIGH.name: 2.6}, busy={LOCKED: 0.97})) == ["queue depth"]


def test_of_the_best_setting_the_busy_core_counts() -> None:
    found = judged({FIO: 4.0, HIGH.name: 3.0}, busy={LOCKED: 0.3, HIGH.name: 0.97})
    assert sorted(names(found)) == ["CPU", "queue depth"]
    assert "it keeps 97% of a core busy" in next(each.evidence for each in found.findings if each.name == "CPU")


def test_nothing_is_called_uncertain_that_is_within_5_percent_of_the_ceiling() -> None:
    steady = (1.0, 1.0, 1.0)
    assert judged({FIO: 2.05}, steady).verdict.endswith("98% of its ceiling of 2.05 GB/s")


def test_a_round_in_which_two_rows_are_equal_counts_against_a_difference() -> None:
    rates = rows({}, (1.0, 1.0, 1.0))
    rates[FIO] = [3e9, 3e9, 2e9]
    assert judge(Measured(False, NEW, rates, {}, VARIATIONS)).findings == []


def test_writes_copy_from_the_gpu() -> None:
    rates = {FIO: [2e9] * 3, LOCKED: [2e9] * 3, GPU: [1e9] * 3}
    assert names(judge(Measured(True, GPU, rates))) == ["copy from the GPU"]


def test_rates_of_the_processor_that_are_unknown_are_not_told() -> None:
    found = judge(Measured(False, NEW, rows({NEW: 0.8, KEPT: 1.2, NEW_TWO.name: 0.8}), {}, VARIATIONS))
    assert names(found) == ["page faults", "memory copies"]
    assert [finding.evidence for finding in found.findings if "one core" in finding.evidence] == []


def test_no_share_is_more_than_the_gap() -> None:
    found = judged({NEW: 1.0, NEW_TWO.name: 1.0, KEPT: 0.5})
    assert [(finding.name, finding.share) for finding in found.findings] == [("memory copies", 1.0)]


def test_no_share_is_negative_where_rounds_failed() -> None:
    rates: dict[str, list[float | None]] = {
        FIO: [9e9] * 3,
        NEW: [1e9] * 3,
        KEPT: [1e9, 5e9, 5e9],
        LOCKED: [2e9, None, None],
    }
    found = {finding.name: finding.share for finding in judge(Measured(False, NEW, rates)).findings}
    assert found["memory copies"] == 0.0


def test_all_that_the_system_refuses_is_named() -> None:
    (found,) = judged({FIO: 4.0}, hindrances=(("no io_uring", "allow it"), ("no huge pages", "reserve them"))).findings
    assert found.evidence.endswith("; no io_uring; no huge pages")
    assert found.fix == "allow it; reserve them"


@pytest.mark.parametrize("faster", [{NEW_TWO.name: 3.0}, {HIGH.name: 2.02}], ids=["an ordinary tensor", "by chance"])
def test_what_is_not_surely_faster_with_page_locked_memory_is_no_ceiling(faster: dict[str, float]) -> None:
    rates = rows(faster)
    rates[FIO] = []
    assert judge(Measured(False, NEW, rates, {}, VARIATIONS)).ceiling == LOCKED
