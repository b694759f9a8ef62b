"""A load that is given up is reported to the manager: it measures a tier as a load that arrived does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from own_clock import OwnClock

from configs.kv_section import KVSettings
from deployments.port import cluster_port
from deployments.port.cluster_port import ClusterPort
from kvmanager.moves.plan import PlannedLoad
from load_tests.harness.patience import patience

DEADLINE_S = 0.02
LOADS = [PlannedLoad(bytes([number]) * 32, 8 * number, 8, "redis", "", 500, 1000) for number in range(3)]


class Manager:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.samples: list[tuple[Any, ...]] = []

    def tell_together(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> None:
        for method, (_, samples) in calls:
            assert method == "report_rates"
            self.samples += samples


class Reader:
    """Brings `arriving` segments; the next one does not come, after `waited_s`."""

    def __init__(self, arriving: int, waited_s: float) -> None:
        self._arriving, self._waited_s = arriving, waited_s
        self.clock = OwnClock()

    def read(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        for _ in loads[: self._arriving]:
            yield memoryview(b"sealed")
        if self._arriving < len(loads):
            self.clock.sleep(self._waited_s)
            yield None


@pytest.fixture
def port() -> Iterator[Any]:
    manager: Any = Manager()
    settings = KVSettings(cpu_tier_bytes=0, load_deadline_s=DEADLINE_S)  # type: ignore[arg-type]
    made: Any = ClusterPort("app", "replica", "node", settings, manager)
    yield made
    made.close()


def fetched(port: Any, reader: Reader, deadline_s: float = 60.0) -> list[tuple[Any, ...]]:
    """What the manager hears of one load."""
    port._reader = reader
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_port, "time", reader.clock)
        list(port.fetch(LOADS, reader.clock.monotonic() + deadline_s))
    port.flush(patience(60.0))
    return port.manager.samples


def test_a_segment_that_is_late_is_reported_with_all_stored_bytes_that_were_asked_for(port: Any) -> None:
    (sample,) = fetched(port, Reader(1, 2 * DEADLINE_S))
    assert sample == ("late", "redis", 1000, pytest.approx(2 * DEADLINE_S))


def test_a_load_that_reached_its_own_deadline_is_late_however_short_that_was(port: Any) -> None:
    (sample,) = fetched(port, Reader(0, DEADLINE_S / 2), deadline_s=DEADLINE_S / 2)
    assert sample[:3] == ("late", "redis", 500)


def test_a_segment_that_is_missing_says_nothing_about_the_tier(port: Any) -> None:
    assert fetched(port, Reader(1, 0.0)) == []


def test_a_registration_that_nobody_waits_for_ends_no_reporting(port: Any) -> None:
    sent: Future[None] = Future()
    sent.cancel()
    port.report_registration(("replica",), sent)
    (sample,) = fetched(port, Reader(0, DEADLINE_S))
    assert sample[:3] == ("late", "redis", 500)


def test_a_load_that_arrives_is_left_to_whoever_writes_it(port: Any) -> None:
    assert fetched(port, Reader(3, 0.0)) == []
