"""A replay's clock."""

from __future__ import annotations

from load_tests.simulator.events import Events


def test_calls_come_in_order_of_time_and_of_asking_and_those_that_they_ask_for_too() -> None:
    events, said = Events(), list[str]()

    def again(now: float) -> None:
        said.append(f"b {now:g}")
        events.at(now, lambda then: said.append(f"c {then:g}"))

    events.at(2.0, lambda now: said.append(f"late {now:g}"))
    events.at(1.0, lambda now: said.append(f"a {now:g}"))
    events.at(1.0, again)
    events.run_until(1.5)
    assert said == ["a 1", "b 1", "c 1"]
    events.run_until()
    assert said[3:] == ["late 2"]
