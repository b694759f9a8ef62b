"""How many requests the ingress works on, how many may wait, and that one more is refused at once.

Invariants:

* `ongoing <= max_ongoing` and `ongoing + waiting <= admitted <= max_ongoing + max_queued`, at every moment;
* a request is refused (`OverloadedError`, 429) before its response starts, never after, and never once admitted;
* turns are given in the order in which they were asked for;
* a ticket that is closed, or a waiting caller that is cancelled, frees its room at once.

Everything runs on the ingress's event loop; nothing here is thread-safe. All operations take constant time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vllm.exceptions import VLLMValidationError

from app.errors import OverloadedError


class Ticket:
    """The room that one HTTP request holds in an `AdmissionQueue`, from its admission to its end."""

    def __init__(self, queue: AdmissionQueue) -> None:
        self._queue = queue
        self._held = 0

    def admit(self, sequences: int) -> None:
        """Hold room for `sequences` more answers (OpenAI's `n`, for each prompt).

        Raises:
            VLLMValidationError: so many would not fit even if nobody else asked.
            OverloadedError: they do not fit now.
        """
        if self._held + sequences > self._queue.capacity:
            raise VLLMValidationError(
                f"This server computes at most {self._queue.capacity} answers per request, over all its prompts.",
                parameter="n",
            )
        if self._queue.admitted + sequences > self._queue.capacity:
            raise OverloadedError
        self._queue.admitted += sequences
        self._held += sequences

    def close(self) -> None:
        """Give the room back. Idempotent."""
        self._queue.admitted -= self._held
        self._held = 0


class AdmissionQueue:
    """A bounded queue in front of the replicas. `admitted` counts answers, `ongoing` and `waiting` count prompts."""

    def __init__(self, max_ongoing: int, max_queued: int) -> None:
        self.capacity = max_ongoing + max_queued
        self.admitted = 0
        self.ongoing = 0
        self.waiting = 0
        self._turns = asyncio.Semaphore(max_ongoing)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until fewer than `max_ongoing` prompts are being computed, then be one of them."""
        self.waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self.waiting -= 1
        self.ongoing += 1
        try:
            yield
        finally:
            self.ongoing -= 1
            self._turns.release()
