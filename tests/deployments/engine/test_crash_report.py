"""A dying engine names the requests that may have ended it, by the ids that they were sent under.

On a live engine: `test_engine_host.py` and `process/test_engine_process.py`.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.engine.crash_report import CrashReport, EngineDiedError, sender_id


def test_suspects_cross_ray_with_the_error() -> None:
    error = ray.exceptions.RayTaskError("generate", "", EngineDiedError(["a", "b"]), proctitle="x", pid=1)
    raised = pickle.loads(pickle.dumps(error)).as_instanceof_cause()
    assert isinstance(raised, EngineDeadError)
    assert raised.cause.suspects == ("a", "b")


@pytest.mark.parametrize("engine_id", ["chatcmpl-x-1f-0123abcd", "3_chatcmpl-x-1f-0123abcd"])
def test_an_id_is_the_one_that_it_was_sent_under(engine_id: str) -> None:
    assert sender_id(engine_id) == "chatcmpl-x-1f"


def scheduler(step: Any, **computed_of_prompt: tuple[int, int]) -> Any:
    requests = {
        f"{name}-00000000": SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=tokens)
        for name, (computed, tokens) in computed_of_prompt.items()
    }
    return SimpleNamespace(requests=requests, schedule=lambda: step)


def step(new: str = "", **running: int) -> Any:
    tokens = {f"{name}-00000000": 1 for name in [*new, *running]}
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(req_id=f"{name}-00000000") for name in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[f"{name}-00000000" for name in running], num_computed_tokens=list(running.values())
        ),
    )


@pytest.mark.parametrize(
    ("planned", "suspects"),
    [
        (step("p", d=60), ["p"]),
        (step("p", c=32, d=60), ["c", "p"]),
        (step(c=32, d=60), ["c"]),
        (step(d=60, e=70), ["d", "e"]),
        (step(), ["p", "w"]),
    ],
    ids=["one is new", "one is new, one in its second chunk", "second chunk", "all decode", "all wait for loads"],
)
def test_who_is_prefilled_is_a_suspect_before_who_decodes(planned: Any, suspects: list[str]) -> None:
    crash_report = CrashReport()
    watched = scheduler(planned, p=(0, 50), w=(0, 50), c=(32, 50), d=(60, 50), e=(70, 50))
    crash_report.watch(watched)
    watched.schedule()
    assert crash_report.suspects() == suspects
    crash_report.step_ended()
    assert crash_report.suspects() == [], "what dies between two steps was ended by no request"


def test_a_continued_request_is_a_suspect_until_all_that_it_has_answered_is_computed() -> None:
    planned = step(c=55, d=60)
    planned.num_scheduled_tokens["c-00000000"] = 20
    watched = scheduler(planned, c=(55, 50), d=(60, 50))
    crash_report = CrashReport()
    crash_report.watch(watched)
    watched.schedule()
    assert crash_report.suspects() == ["c"], "its prompt is there, and 25 tokens of its answer are computed anew"


def test_a_death_in_the_planning_names_what_was_not_computed_yet() -> None:
    crash_report, watched = CrashReport(), scheduler(None, p=(0, 50), d=(60, 50))

    def fail() -> None:
        raise RuntimeError

    watched.schedule = fail
    crash_report.watch(watched)
    with pytest.raises(RuntimeError):
        watched.schedule()
    assert crash_report.suspects() == ["p"]
