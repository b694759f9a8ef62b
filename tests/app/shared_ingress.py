"""Ingresses that the tests of a file use one after the other, each in front of its own test's backend.

An ingress takes a fifth of a second of processor time to put together, most of it for routes, which no test changes.
What a test leaves in one is taken away before the next test gets it: its requests have ended, and all counters are
zero. An ingress also remembers replicas that have died, prompts that were answered, and jobs. A test of that memory, or
one that changes what an ingress reads when it is put together, takes one that has not served before: `fresh`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from ingress_server import Server, running, wait_until
from prometheus_client import CollectorRegistry, Counter, Histogram
from vllm.config import VllmConfig

from app.backend.protocols import Backend, HealthReport

FOLLOWS_NONE = next(field.default for field in dataclasses.fields(Backend) if field.name == "follow_replicas")


class Ingresses:
    """All that run, by their settings; a test gets those that no other part of it has."""

    def __init__(self, vllm_config: VllmConfig, stack: contextlib.ExitStack) -> None:
        """`stack`: ends them."""
        self._vllm_config = vllm_config
        self._stack = stack
        self._idle: dict[str, list[_Ingress]] = {}

    @contextlib.contextmanager
    def lend(self, behind: Backend, **options: Any) -> Iterator[Server]:
        """An ingress with `options`, those of `ingress_server.running`, in front of `behind`."""
        idle = self._idle.setdefault(repr(sorted(options.items())), [])
        ingress = idle.pop() if idle else _Ingress(self._vllm_config, self._stack, options)
        yield ingress.before(behind)
        ingress.reset()
        idle.append(ingress)  # no other test gets one where a request goes on, or something is still counted


class _Ingress:
    """One of them."""

    def __init__(self, vllm_config: VllmConfig, stack: contextlib.ExitStack, options: dict[str, Any]) -> None:
        self._replicas, self._control = _StandIn(), _StandIn()
        self._registry = CollectorRegistry()
        stands: Any = Backend(
            self._replicas,  # type: ignore[arg-type]
            self._control,  # type: ignore[arg-type]
            self._health,
            metrics=lambda: self._behind.metrics(),
        )
        self._server = stack.enter_context(running(vllm_config, stands, registry=self._registry, **options))

    def before(self, behind: Backend) -> Server:
        """Put it there."""
        assert behind.follow_replicas is FOLLOWS_NONE, "this one was told once, when it started"
        self._behind = behind
        self._replicas.stands_for, self._control.stands_for = behind.replicas, behind.control
        return Server(f"http://127.0.0.1:{self._server.port}", behind.replicas)  # type: ignore[arg-type]

    def reset(self) -> None:
        """Take away what its test has left. Raises AssertionError where that cannot be."""
        wait_until(lambda: self._server.is_idle)
        _zero(self._registry)
        assert counts(self._registry) == {}

    async def _health(self) -> HealthReport:
        return await self._behind.health()


@dataclasses.dataclass
class _StandIn:
    """Passes each call on to what stands behind it by then."""

    stands_for: Any = None

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, name)

    def _call(self, name: str, *args: Any, **more: Any) -> Any:
        return getattr(self.stands_for, name)(*args, **more)


def counts(registry: CollectorRegistry) -> dict[str, float]:
    """What counters and histograms have counted, by the sample's name."""
    families = [family for family in registry.collect() if family.type in ("counter", "histogram")]
    samples = [one for family in families for one in family.samples if not one.name.endswith("_created")]
    return {one.name: one.value for one in samples if one.value}


def _zero(registry: CollectorRegistry) -> None:
    """Leans on prometheus_client: what a metric keeps its counts in."""
    for collector in list(registry._collector_to_names):
        for metric in (collector, *getattr(collector, "_metrics", {}).values()):
            if isinstance(metric, Counter) and hasattr(metric, "_value"):
                metric._value.set(0.0)
            if isinstance(metric, Histogram) and hasattr(metric, "_sum"):
                for kept in (metric._sum, *metric._buckets):
                    kept.set(0.0)
