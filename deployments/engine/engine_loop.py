"""What steps a replica's engine, as the parts around it see it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from deployments.engine.heartbeat import Heartbeat

T = TypeVar("T")


class EngineLoop(Protocol):
    """Steps the engine: `deployments.engine.host.EngineThread`, or vLLM's own process with ours in it."""

    heartbeat: Heartbeat
    on_turn: Callable[[], None]
    """Called on the engine thread after every step and after calls between steps; must not block or raise."""

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        ...

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        ...

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine thread, between two steps; from any thread."""
        ...

    def wake(self) -> None:
        """Wake the engine for an event that it may be waiting for. From any thread."""
        ...
