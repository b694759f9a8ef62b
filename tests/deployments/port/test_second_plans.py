"""A thread without a loop asks for a plan and goes on; the answer comes, or that there is none."""

from __future__ import annotations

import queue
from typing import Any

from deployments.port.cluster_port import SecondPlans
from load_tests.harness.patience import patience

PLAN: Any = {"lease_id": 1}


async def answers() -> Any:
    return PLAN


async def fails() -> Any:
    raise RuntimeError("the manager")


def test_each_question_is_answered_once_and_one_that_fails_has_no_plan() -> None:
    plans, heard = SecondPlans(), queue.SimpleQueue[Any]()
    plans.close()  # never asked
    for question in (answers(), fails(), answers()):
        plans.ask(question, heard.put)
    found = [heard.get(timeout=patience(20)) for _ in range(3)]
    plans.close()
    assert sorted(map(str, found)) == sorted(map(str, [PLAN, None, PLAN]))
    assert heard.empty()
