"""Whoever asks for an actor waits for a deadline at the longest, also while Ray's directory does not answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray

from deployments.protocol import actor_finder, manager_client
from deployments.protocol.actor_finder import ActorFinder
from deployments.protocol.call_batches import MOST_CALLS, CallQueue
from deployments.protocol.manager_client import MOST_TOLD, ManagerClient, ManagerUnavailableError


class Directory:
    """Ray's, which may hang; counts how often it is asked."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.found: Any = None
        self.asked = 0

    def find(self, app_name: str = "") -> Any:
        self.asked += 1
        self.answers.wait()
        if self.found is None:
            raise ManagerUnavailableError("the KV manager is not running")
        return self.found


@pytest.fixture
def directory() -> Iterator[Directory]:
    made = Directory()
    yield made
    made.answers.set()  # no thread stays behind


class Handle:
    """A manager's: `handle.method.remote(...)`, whose answers are what `answer` returns."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        return self

    def remote(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.answer()


def test_callers_share_one_search_and_none_of_them_cancels_it(directory: Directory) -> None:
    finder = ActorFinder(directory.find)
    searches = [finder.search() for _ in range(20)]
    assert not any(search.cancel() for search in searches)
    directory.found = object()
    directory.answers.set()
    assert {id(search.result(10)) for search in searches} == {id(directory.found)}
    assert finder.handle is directory.found
    assert directory.asked == 1


def test_a_search_that_failed_is_not_repeated_at_once(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_finder, "SEARCH_PAUSE_S", 3600.0)
    directory.answers.set()
    finder = ActorFinder(directory.find)
    for _ in range(50):
        with pytest.raises(ManagerUnavailableError, match="not running"):
            finder.wait(10)
    assert directory.asked == 1


def test_losing_an_actor_does_not_lose_its_successor(directory: Directory) -> None:
    directory.answers.set()
    first, second = object(), object()
    directory.found = first
    finder = ActorFinder(directory.find)
    assert finder.wait(10) is first
    finder.lost(first)
    directory.found = second
    assert finder.wait(10) is second
    finder.lost(first)  # somebody else's call to the first one has failed just now
    assert finder.handle is second
    assert directory.asked == 2


def test_a_directory_that_hangs_holds_up_no_event_loop(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.protocol.actor_finder.SEARCH_S", 60.0)  # however busy the machine is
    monkeypatch.setattr(manager_client, "_find_actor", directory.find)
    client = ManagerClient("app")

    async def check() -> None:
        turns = 0

        async def beat() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(beat())
        with pytest.raises(ManagerUnavailableError):
            await client.ask("plan", timeout_s=0.05)
        assert turns > 0, "the loop went on"
        with pytest.raises(ManagerUnavailableError, match="looked for"):
            client.tell("release")
        beating.cancel()

    asyncio.run(check())
    with pytest.raises(ManagerUnavailableError, match="not found in time"):
        client.ask_blocking("offer", timeout_s=0.05)
    assert directory.asked == 1


def test_threads_that_lose_the_manager_at_the_same_time_all_get_an_answer_or_a_word(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_client, "_find_actor", directory.find)
    monkeypatch.setattr(actor_finder, "SEARCH_PAUSE_S", 0.0)
    directory.answers.set()
    numbers = iter(range(10**9))

    def answer() -> Any:
        if next(numbers) % 2:
            raise ray.exceptions.RayActorError
        return 7

    directory.found = Handle(answer)
    monkeypatch.setattr(manager_client.ray, "get", lambda answer, timeout: answer)
    client = ManagerClient("app")

    def ask(_: int) -> str:
        try:
            return str(client.ask_blocking("offer", timeout_s=10))
        except ManagerUnavailableError:
            return "unavailable"

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(ask, range(2000))) == {"7", "unavailable"}


def test_a_manager_that_hangs_is_not_told_without_end(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_client, "_find_actor", directory.find)
    directory.answers.set()
    directory.found = handle = Handle(object)
    carried_out: set[Any] = set()

    def wait(refs: Any, **options: Any) -> tuple[list[Any], list[Any]]:
        return [ref for ref in refs if ref in carried_out], [ref for ref in refs if ref not in carried_out]

    monkeypatch.setattr(manager_client.ray, "wait", wait)
    client = ManagerClient("app")
    for _ in range(MOST_TOLD):
        client.tell("report_placement")
    for _ in range(MOST_TOLD):
        with pytest.raises(ManagerUnavailableError, match="has not carried out"):
            client.tell("report_placement")
    assert len(handle.calls) == MOST_TOLD
    carried_out.update(client._told)
    client.tell("report_placement")
    assert len(handle.calls) == MOST_TOLD + 1


def test_calls_that_nobody_waits_for_do_not_pile_up_before_a_manager_that_hangs() -> None:
    async def check() -> None:
        async def never() -> None:
            await asyncio.sleep(3600)

        queue = CallQueue(Handle(never))
        for _ in range(20 * MOST_CALLS):
            call = queue.call("plan", ())
            await asyncio.sleep(0)
            call.cancel()
        assert len(queue._waiting) <= MOST_CALLS
        for task in queue._tasks:
            task.cancel()

    asyncio.run(check())
