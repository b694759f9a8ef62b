"""How a port calls its peers: behind a breaker, with each wait measured, and for the engine thread on another loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from kvmanager.circuit_breaker import CircuitBreaker, CircuitState
from kvmanager.moves.plan import Plan

logger = logging.getLogger(__name__)

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)


class LockedBreaker:
    """A circuit breaker (`kvmanager.circuit_breaker`) that several threads share."""

    def __init__(self) -> None:
        self._breaker = CircuitBreaker()
        self._lock = threading.Lock()

    def allows(self, now: float) -> bool:
        """See `CircuitBreaker.allows`."""
        with self._lock:
            return self._breaker.allows(now)

    def succeeded(self) -> None:
        """See `CircuitBreaker.succeeded`."""
        with self._lock:
            self._breaker.succeeded()

    def failed(self, now: float) -> None:
        """See `CircuitBreaker.failed`."""
        with self._lock:
            self._breaker.failed(now)

    def abandoned(self) -> None:
        """See `CircuitBreaker.abandoned`."""
        with self._lock:
            self._breaker.abandoned()

    @property
    def state(self) -> CircuitState:
        """See `CircuitBreaker.state`."""
        return self._breaker.state


class PortWaits:
    """Waits for the manager and for each tier; they guide the choice of the deadlines in the settings.

    Two histograms in a registry of their own. Safe from any thread.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.plan = Histogram(
            "crosskv_plan_seconds", "Waits for the KV manager's plan of a prompt.", buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self.segment = Histogram(
            "crosskv_segment_wait_seconds", "Waits for the next segment of a load, come or not.", ["tier"],
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip


class SecondPlans:
    """Plans for requests that an engine has preempted: asked on a loop of their own, for the engine thread has none.

    The loop's thread is started with the first question. Where the engine is a process of its own it runs there.
    `ask` returns at once, from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def ask(self, question: Coroutine[Any, Any, Plan | None], on_plan: Callable[[Plan | None], None]) -> None:
        """`on_plan` hears the answer, None for a question that fails. On the loop's thread."""

        async def answered() -> None:
            plan: Plan | None = None
            try:
                plan = await question
            except Exception:
                logger.exception("a plan for a preempted request failed")
            on_plan(plan)

        asyncio.run_coroutine_threadsafe(answered(), self._started())

    def close(self) -> None:
        """Stop the event loop that asks for plans."""
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
