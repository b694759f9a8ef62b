"""Plans for requests that an engine has preempted: asked on a loop of their own, for the engine thread has none.

The loop's thread is started with the first question. Where the engine is a process of its own it runs there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from deployments.protocol.kv_port import PlanDict

logger = logging.getLogger(__name__)


class SecondPlans:
    """`ask` returns at once, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def ask(self, question: Coroutine[Any, Any, PlanDict | None], on_plan: Callable[[PlanDict | None], None]) -> None:
        """`on_plan` hears the answer, None for a question that fails. On the loop's thread."""

        async def answered() -> None:
            plan: PlanDict | None = None
            try:
                plan = await question
            except Exception:
                logger.exception("a plan for a preempted request failed")
            on_plan(plan)

        asyncio.run_coroutine_threadsafe(answered(), self._started())

    def close(self) -> None:
        """Nobody asks any more."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="crosskv-plans", daemon=True).start()
            return self._loop
