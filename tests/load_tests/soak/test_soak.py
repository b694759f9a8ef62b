"""Which processes are judged, and what is said of them."""

from __future__ import annotations

import os

import psutil

from load_tests.soak.__main__ import MIB, Watched, grows, growth, read, table

TIMES = list(range(0, 200, 5))


def test_a_process_that_grows_comes_first_and_one_that_came_later_is_not_judged() -> None:
    watched = {
        1: Watched(1, "manager", [100 * MIB + number % 2 for number in range(40)]),
        2: Watched(2, "replica", [100 * MIB + number * MIB for number in range(40)]),
        3: Watched(3, "replica", [100 * MIB + number * MIB for number in range(30)]),
    }
    found = growth(TIMES, watched)
    assert [(one.pid, grows(line)) for one, line in found] == [(2, True), (1, False)]
    lines = table(found).splitlines()
    assert "+12.00 to +12.00" in lines[-2]
    assert "yes" in lines[-2]
    assert lines[-1].endswith("| no |")


def test_a_growth_that_is_certain_and_too_small_to_care_for_is_none() -> None:
    """.05 MiB a minute, and .3: both without any noise."""
    found = growth(
        TIMES,
        {
            1: Watched(1, "Ray's daemons", [100 * MIB + round(time_s * 0.05 * MIB / 60) for time_s in TIMES]),
            2: Watched(2, "ingress", [100 * MIB + round(time_s * 0.3 * MIB / 60) for time_s in TIMES]),
        },
    )
    assert all(line.rises_by_more_than(0.0) for _, line in found)
    assert {one.kind: grows(line) for one, line in found} == {"ingress": True, "Ray's daemons": False}


def test_the_private_memory_of_each_process_is_read() -> None:
    watched: dict[int, Watched] = {}
    read(psutil.Process(), watched)
    read(psutil.Process(), watched)
    mine = watched[os.getpid()]
    assert len(mine.uss_bytes) == 2
    assert mine.uss_bytes[0] > MIB
