import pytest

from load_tests.measuring.comparison import Bound, Comparison
from load_tests.micro.overhead import table


@pytest.mark.parametrize(
    ("on", "bound", "missed"),
    [
        (1.02, Bound(1.03), False),
        (1.04, Bound(1.03), True),
        (1.02, Bound(1.03, at_most=False), True),
        (1.04, Bound(1.03, at_most=False), False),
    ],
)
def test_the_table_says_which_targets_are_missed(on, bound, missed):
    values = {"off": [1.0, 1.0, 1.0], "on": [on, on, on if missed else 9.0]}
    lines = table([Comparison("TPOT", "ms", "off", values, ("on",), bound)], 3).splitlines()
    assert any(line.startswith("Missed: TPOT, on") for line in lines) == missed
    assert (lines[-1] == "All targets are reached.") == (not missed)


def test_arms_without_a_target_have_a_row_and_miss_nothing():
    values = {"off": [1.0], "on": [1.0], "off, again": [7.0]}
    lines = table([Comparison("TPOT", "ms", "off", values, ("on",), Bound(1.03))], 1).splitlines()
    assert "| TPOT | off, again | 7 / 7 / 7 ms | 7.000 / **7.000** / 7.000 | 7.000 to 7.000, not shown |  |" in lines
    assert "| TPOT | off | 1 / 1 / 1 ms | 1 |  |  |" in lines
    assert lines[-1] == "All targets are reached."
