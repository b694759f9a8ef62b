import pytest

from load_tests.micro.throttle import Served, plot, summary, table


def step(load, recompute, auto):
    arms = {"load": load, "recompute": recompute, "auto": auto}
    return summary({arm: [Served(seconds, 0, "hit") for seconds in found] for arm, found in arms.items()}, learning=1)


def test_auto_is_held_against_the_better_of_the_other_two_and_its_learning_is_left_out():
    row = step(load=[9.0, 1.0, 2.0, 3.0], recompute=[9.0, 4.0, 4.0, 4.0], auto=[9.0, 2.1, 2.2, 2.3])
    assert row["ratio"] == pytest.approx(1.1)
    assert row["ttft_s"]["auto"] == [2.1, 2.2, 2.3]
    assert row["learning_auto_s"] == [9.0]
    assert row["reasons"] == {"hit": 3}


@pytest.mark.parametrize(("auto", "verdict"), [(1.1, "held"), (1.2, "not held")])
def test_the_table_says_whether_the_target_is_held(auto, verdict, tmp_path):
    rows = [{"bytes_per_s": 1e6, **step([5.0, 2.0], [5.0, 1.0], [5.0, auto])}]
    lines = table(rows, tokens=100, rounds=1, learning=1).splitlines()
    assert lines[-1] == f"Worst ratio {auto:.2f}; target 1.10: {verdict}."
    assert sum(line.startswith("| 1 |") for line in lines) == 1
    plot(rows, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").stat().st_size > 1000
