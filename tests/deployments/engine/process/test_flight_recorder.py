"""What a process of the engine's leaves behind, as its replica reads it."""

from __future__ import annotations

import multiprocessing
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from dying_process import die_in_a_step

from deployments.engine.crash_report import CrashReport
from deployments.engine.process.flight_recorder import NAMES_BYTES, FlightRecorder


def test_the_step_is_known_of_a_process_that_was_killed_in_it() -> None:
    recorder = FlightRecorder.shared()
    process = multiprocessing.get_context("spawn").Process(target=die_in_a_step, args=(recorder,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert recorder.suspects() == ["one", "two"]
    assert recorder.beat.count == 1
    assert recorder.last_words == ""


def test_who_is_to_blame_depends_on_what_the_engine_was_at() -> None:
    recorder = FlightRecorder()
    assert recorder.suspects() == []
    recorder.planning()
    assert recorder.suspects() is None, "the replica's own books tell"
    recorder.computing(["a"])
    assert recorder.suspects() == ["a"]
    recorder.between_steps()
    assert recorder.suspects() == []
    recorder.computing(["a"])
    assert recorder.suspects() == ["a"], "noted again, though it is the same"
    recorder.died(RuntimeError("out of memory"), ["b"])
    assert (recorder.last_words, recorder.suspects()) == ("RuntimeError('out of memory')", ["b"])
    recorder.died(RuntimeError("x" * 10_000), [])
    assert recorder.last_words.startswith("RuntimeError('xxx")
    assert recorder.suspects() == []


def test_more_names_than_there_is_room_for_are_left_out_whole() -> None:
    recorder = FlightRecorder()
    names = [f"request-{number:06d}-" + "x" * 80 for number in range(10_000)]
    recorder.computing(names)
    noted = recorder.suspects()
    assert noted == names[: len(noted or ())]
    assert NAMES_BYTES - 200 < sum(len(name) + 1 for name in noted or ()) <= NAMES_BYTES


def planned(new: str = "", tokens: int = 1, answered: int = 3, **running: int) -> Any:
    """Of those that run, the first one computes `tokens`, the others decode."""
    scheduled = {**dict.fromkeys([*new, *running], 1), **dict.fromkeys(list(running)[:1], tokens)}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running),
            num_computed_tokens=list(running.values()),
            num_output_tokens=[answered for _ in running],
        ),
    )


@pytest.mark.parametrize(
    ("step", "suspects"),
    [
        (planned("p", d=60), ["p"]),
        (planned(c=32, d=60, tokens=8, answered=0), ["c"]),
        (planned(c=32, d=60, answered=0), ["c"]),
        (planned(d=60, e=70), ["d", "e"]),
        (planned(), None),
    ],
    ids=["one is new", "a second chunk", "a second chunk of one token", "all decode", "all wait for loads"],
)
def test_each_step_is_noted_with_its_suspects_before_it_is_computed(step: Any, suspects: list[str] | None) -> None:
    recorder = FlightRecorder()
    crash_report = CrashReport(recorder)
    prompts = {"p": (0, 50), "c": (32, 50), "d": (60, 50), "e": (70, 50)}
    requests = {
        name: SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=tokens)
        for name, (computed, tokens) in prompts.items()
    }
    scheduler = SimpleNamespace(requests=requests, schedule=lambda: step)
    crash_report.watch(scheduler)
    scheduler.schedule()
    assert recorder.suspects() == suspects
    crash_report.step_ended()
    assert recorder.suspects() == []
