import asyncio
import itertools

import pytest
from rich.progress import Progress

from load_tests.micro.overhead import Question, measured, report, rotated, table


def question(values, bound, at_most):
    return Question("TPOT", "ms", "off", ("on",), bound, at_most, values)


def test_a_ratio_is_of_the_two_arms_of_one_round():
    asked = question({"off": [1.0, 2.0, 4.0], "on": [1.1, 2.0, 5.0]}, 1.03, at_most=True)
    assert asked.ratios("on") == pytest.approx([1.1, 1.0, 1.25])


@pytest.mark.parametrize(
    ("on", "at_most", "missed"),
    [(1.02, True, False), (1.04, True, True), (1.02, False, True), (1.04, False, False)],
)
def test_a_target_is_missed_when_the_median_ratio_lies_beyond_its_bound_on_the_wrong_side(on, at_most, missed):
    asked = question({"off": [1.0, 1.0, 1.0], "on": [on, on, 9.0 if not missed else on]}, 1.03, at_most)
    assert bool(asked.misses()) == missed
    assert ("Missed: TPOT, on" in table([asked], 3)) == missed
    assert ("All targets are reached." in table([asked], 3)) == (not missed)


def test_arms_without_a_target_miss_nothing_and_have_a_row():
    asked = question({"off": [1.0], "on": [1.0], "off, again": [7.0]}, 1.03, at_most=True)
    assert asked.misses() == []
    lines = table([asked], 1).splitlines()
    assert "| TPOT | off, again | 7 / 7 / 7 ms | 7.000 / **7.000** / 7.000 |  |" in lines
    assert "| TPOT | off | 1 / 1 / 1 ms | 1 |  |" in lines


def test_every_arm_has_each_place_in_the_order_equally_often():
    arms = ["a", "b", "c"]
    orders = [rotated(arms, number) for number in range(3)]
    assert all(sorted(order) == arms for order in orders)
    assert all(sorted(at) == arms for at in zip(*orders, strict=True))


def test_the_first_round_warms_up_and_does_not_count():
    runs = []

    def arm(name):
        values = itertools.count()

        async def run():
            runs.append(name)
            return float(next(values))

        return run

    with Progress(disable=True) as progress:
        values = asyncio.run(measured({"a": arm("a"), "b": arm("b")}, 2, progress, "arms"))
    assert values == {"a": [1.0, 2.0], "b": [1.0, 2.0]}
    assert runs == ["a", "b", "b", "a", "a", "b"]


def test_the_report_has_values_ratios_and_misses():
    asked = question({"off": [1.0, 2.0], "on": [2.0, 2.0]}, 1.03, at_most=True)
    found = report([asked], 2, redis=False)
    assert (found["rounds"], found["redis"]) == (2, False)
    (only,) = found["questions"]
    assert only["values"]["on"] == [2.0, 2.0]
    assert only["ratios"]["on"] == [1.0, 1.5, 2.0]
    assert len(only["misses"]) == 1
