"""Questions to another process are answered in any order, fail in words, and end with the process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.engine.process.channel import Asker, answer, hear, say
from load_tests.harness.patience import patience


class OddError(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("odd")
        self.lock = threading.Lock()


class Handler:
    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()

    async def wait(self) -> str:
        await self.may_go_on.wait()
        return "late"

    async def go_on(self) -> int:
        self.may_go_on.set()
        return 7

    async def fail(self, how: str) -> None:
        raise ValueError("mine") if how == "plainly" else OddError()


def talk(test: Callable[[Asker, socket.socket], Awaitable[None]]) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        answering = asyncio.create_task(answer(theirs, Handler()))
        asker = Asker(ours)
        try:
            await asyncio.wait_for(test(asker, theirs), patience(20))
        finally:
            asker.close()
            await asyncio.wait_for(answering, patience(20))

    asyncio.run(main())


def test_a_slow_answer_holds_up_no_other() -> None:
    async def check(asker: Asker, theirs: socket.socket) -> None:
        slow = asyncio.create_task(asker.ask("wait"))
        await asyncio.sleep(0)
        assert await asker.ask("go_on") == 7
        assert await slow == "late"

    talk(check)


def test_what_fails_there_is_raised_here() -> None:
    async def check(asker: Asker, theirs: socket.socket) -> None:
        with pytest.raises(ValueError, match="mine"):
            await asker.ask("fail", "plainly")
        with pytest.raises(RuntimeError, match="OddError"):
            await asker.ask("fail", "oddly")
        with pytest.raises(AttributeError):
            await asker.ask("unknown")
        assert await asker.ask("go_on") == 7

    talk(check)


def test_who_waits_when_the_other_side_ends_hears_so_and_nobody_hangs() -> None:
    async def check(asker: Asker, theirs: socket.socket) -> None:
        slow = asyncio.create_task(asker.ask("wait"))
        await asyncio.sleep(0.01)
        theirs.shutdown(socket.SHUT_RDWR)
        with pytest.raises(EngineDeadError):
            await slow
        with pytest.raises(EngineDeadError):
            await asker.ask("go_on")

    talk(check)


class Unreadable:
    """Raises where it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_what_cannot_be_read_there_ends_the_talk_and_nobody_hangs() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        answering = asyncio.create_task(answer(theirs, Handler()))
        asker = Asker(ours)
        slow = asyncio.create_task(asker.ask("wait"))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(asker.ask("go_on", Unreadable()), patience(20))
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(slow, patience(20))
        with pytest.raises(ValueError, match="no number"):
            await answering

    asyncio.run(main())


@pytest.mark.parametrize("said", ["ready", ValueError("not ready"), None], ids=repr)
def test_the_first_word_comes_before_any_loop(said: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if said is None:
            theirs.close()
        else:
            say(theirs, said)
        heard = hear(ours, 10.0)
    assert repr(heard) == repr(said)
