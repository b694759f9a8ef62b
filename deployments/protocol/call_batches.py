"""Calls of one process to the manager that travel together: one actor call for all that wait.

An actor call costs both sides some 0.3 ms of processor time whatever it carries, more than the manager needs for most
of what it is asked. So a caller has at most `MOST_UNDER_WAY` calls under way, and what is asked meanwhile goes with the
next one. Alone, a call is not delayed; the busier the manager, the larger the batches. What a replica reports travels
together as well (`ManagerClient.tell_together`).

Only methods that never wait for anything (`BATCHED`) take part, so none of a batch holds up the others. They run in the
order in which they were asked, and each has its own answer or its own error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

BATCHED = frozenset({"plan", "release", "commit", "abandon", "report_placement", "report_rates"})
"""Methods of the manager's actor that do not await anything."""
MOST_UNDER_WAY = 2
"""One is worked on while the other travels."""
MOST_CALLS = 32
"""In one batch, so that the first does not wait long for the last."""


async def carry_out(target: Any, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[tuple[bool, Any]]:
    """The manager's side: (True, answer) or (False, what went wrong) for each call (method, arguments) of `target`.

    Each call is an argument of its own of the actor's `batch`, for Ray sends only small arguments along with a call.
    """
    return [await _one(target, method, arguments) for method, arguments in calls]


async def _one(target: Any, method: str, arguments: Sequence[Any]) -> tuple[bool, Any]:
    if method not in BATCHED:
        return False, f"{method} is not to be called in a batch"
    try:
        return True, await getattr(target, method)(*arguments)
    except Exception as error:
        logger.exception("%s failed", method)  # the answer of a report is not read
        return False, f"{type(error).__name__}: {error}"


class CallFailedError(Exception):
    """The manager raised; the message says what."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that waits or is under way; `late` hears what it brings once `answer` is cancelled."""

    method: str
    arguments: Sequence[Any]
    answer: asyncio.Future[Any]
    late: Callable[[Any], None] | None


class CallQueue:
    """The caller's side, for one handle on the manager. Every method on one event loop."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._waiting: list[_Call] = []
        self._under_way = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def call(
        self, method: str, arguments: Sequence[Any], late: Callable[[Any], None] | None = None
    ) -> asyncio.Future[Any]:
        """Ask for a call of a method in `BATCHED`; raises there CallFailedError and what Ray raises.

        `late` hears an answer that comes when the future was cancelled while the call was under way; it must not raise.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        if len(self._waiting) >= MOST_CALLS:  # a manager that hangs lets them wait; most have no caller left
            self._waiting = [call for call in self._waiting if not call.answer.done()]
        self._waiting.append(_Call(method, arguments, answer, late))
        if self._under_way < MOST_UNDER_WAY:
            self._under_way += 1
            task = loop.create_task(self._send_all(), context=Context())  # it belongs to all callers, not to the first
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return answer

    async def _send_all(self) -> None:
        """Send what waits, batch after batch, until nothing does."""
        try:
            while self._waiting:
                calls, self._waiting = self._waiting[:MOST_CALLS], self._waiting[MOST_CALLS:]
                if calls := [call for call in calls if not call.answer.done()]:  # done: the caller no longer waits
                    await self._send(calls)
        finally:
            self._under_way -= 1

    async def _send(self, calls: Sequence[_Call]) -> None:
        try:
            answers = await self.handle.batch.remote(*((call.method, call.arguments) for call in calls))
        except Exception as error:
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(error)
            return
        for call, (well, value) in zip(calls, answers, strict=True):
            if call.answer.done():
                if well and call.late is not None:
                    call.late(value)
            elif well:
                call.answer.set_result(value)
            else:
                call.answer.set_exception(CallFailedError(value))
