"""Calls that travel together: each has its own answer or error, in order, and a dead manager ends them all."""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.manager.actor import KVManagerActor
from deployments.protocol import manager_client
from deployments.protocol.call_batches import BATCHED, MOST_UNDER_WAY, CallFailedError, CallQueue, carry_out
from deployments.protocol.manager_client import ManagerClient
from load_tests.harness.patience import patience

PATIENCE_S = 60.0


class Manager:
    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.dead = False

    async def plan(self, number: int) -> int:
        if number < 0:
            raise ValueError("a defect")
        return number

    async def offer(self) -> None:
        """Not to be sent in a batch."""

    async def send(self, *calls: Any) -> Any:
        self.batches.append([arguments[0] for _, arguments in calls if arguments])
        await self.gate.wait()
        if self.dead:
            raise ConnectionError("gone")
        return await carry_out(self, calls)


def queue_of(manager: Manager) -> CallQueue:
    return CallQueue(SimpleNamespace(batch=SimpleNamespace(remote=manager.send)))


def test_what_is_asked_while_calls_are_under_way_travels_together_in_order() -> None:
    async def check() -> None:
        manager = Manager()
        manager.gate.clear()
        queue = queue_of(manager)
        first = []
        for number in range(MOST_UNDER_WAY):
            first.append(queue.call("plan", [number]))
            await asyncio.sleep(0)
        rest = [queue.call("plan", [number]) for number in range(10, 20)]
        await asyncio.sleep(0)
        manager.gate.set()
        assert await asyncio.gather(*first, *rest) == [*range(MOST_UNDER_WAY), *range(10, 20)]
        assert manager.batches == [*([number] for number in range(MOST_UNDER_WAY)), list(range(10, 20))]

    asyncio.run(check())


@pytest.mark.parametrize("method", sorted(BATCHED))
def test_what_may_travel_in_a_batch_waits_for_nothing(method: str) -> None:
    source = ast.parse(textwrap.dedent(inspect.getsource(getattr(KVManagerActor, method))))
    waits = (ast.Await, ast.AsyncFor, ast.AsyncWith)
    assert not [node for node in ast.walk(source) if isinstance(node, waits)]


def test_an_error_is_its_own_calls_and_no_others_and_is_logged(own_records: Any) -> None:
    async def check() -> None:
        queue = queue_of(Manager())
        answers = await asyncio.gather(
            *(queue.call("plan", [number]) for number in (1, -1, 2)), queue.call("offer", []), return_exceptions=True
        )
        assert answers[::2] == [1, 2]
        assert [type(answers[at]) for at in (1, 3)] == [CallFailedError] * 2
        assert "a defect" in str(answers[1])
        assert [record.getMessage() for record in own_records()] == ["plan failed"]

    asyncio.run(check())


def test_a_manager_that_is_gone_ends_all_calls_and_one_that_is_back_answers_again() -> None:
    async def check() -> None:
        manager = Manager()
        queue = queue_of(manager)
        manager.dead = True
        answers = await asyncio.gather(*(queue.call("plan", [n]) for n in range(5)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [ConnectionError] * 5
        manager.dead = False
        assert await queue.call("plan", [7]) == 7

    asyncio.run(check())


def test_a_call_that_nobody_waits_for_any_more_is_not_sent() -> None:
    async def check() -> None:
        manager = Manager()
        manager.gate.clear()
        queue = queue_of(manager)
        for number in range(MOST_UNDER_WAY):
            queue.call("plan", [number])
            await asyncio.sleep(0)
        late, wanted = queue.call("plan", [98]), queue.call("plan", [99])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(late, 0.01)
        manager.gate.set()
        assert await wanted == 99
        assert manager.batches[-1] == [99]

    asyncio.run(check())


def test_an_answer_that_nobody_waits_for_any_more_is_told_and_an_error_is_not() -> None:
    async def check() -> None:
        manager = Manager()
        manager.gate.clear()
        queue = queue_of(manager)
        heard: list[int] = []
        for number in (7, -1):
            call = queue.call("plan", [number], heard.append)
            await asyncio.sleep(0)
            call.cancel()
        queue.call("plan", [8], heard.append).cancel()
        awaited = queue.call("plan", [9], heard.append)
        manager.gate.set()
        assert await awaited == 9
        assert heard == [7]

    asyncio.run(check())


def test_an_answer_that_comes_as_its_asker_gives_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        manager = Manager()
        manager.gate.clear()
        handle = SimpleNamespace(batch=SimpleNamespace(remote=manager.send))
        monkeypatch.setattr(manager_client, "_find_actor", lambda app: handle)
        client = ManagerClient("app")
        heard: list[int] = []

        def give_up(answer: int) -> None:
            heard.append(answer)
            asking.cancel()  # which has its answer, and is about to be woken

        async def ask(number: int, late: Any) -> None:
            await client.ask("plan", number, timeout_s=patience(PATIENCE_S), late=late)

        client.find(patience(PATIENCE_S))
        asking, gone = asyncio.create_task(ask(7, heard.append)), asyncio.create_task(ask(8, give_up))
        await asyncio.sleep(0.01)
        assert manager.batches == [[7, 8]]
        gone.cancel()
        await asyncio.sleep(0)
        manager.gate.set()
        await asyncio.wait([asking, gone])
        assert asking.cancelled()
        await asyncio.sleep(0)
        assert heard == [8, 7]

    asyncio.run(check())
