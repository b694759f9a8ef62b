"""What a replica reports of one engine step reaches the manager in one call, and nothing of it is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from configs.kv_section import KVSettings
from deployments.port import cluster_port as ray_port
from deployments.port.cluster_port import ClusterPort
from deployments.protocol.call_batches import BATCHED
from deployments.protocol.manager_client import ManagerClient, ManagerUnavailableError
from kvmanager.moves.plan import PlannedLoad
from load_tests.harness.patience import PATIENCE_S, patience

LOAD = PlannedLoad(b"k" * 32, 0, 8, "cpu", "node", 500, 500)


class Manager(ManagerClient):
    """Remembers each call to the actor."""

    def __init__(self) -> None:
        super().__init__("app")
        self.calls: list[tuple[Any, ...]] = []
        self.gone = False

    def tell(self, method: str, *args: Any) -> None:
        if self.gone:
            raise ManagerUnavailableError("gone in this test")
        self.calls.append((method, *args))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    # All that a test reports waits for its flush.
    monkeypatch.setattr(ray_port, "REPORT_EVERY_S", PATIENCE_S)
    settings = KVSettings(cpu_tier_bytes=0)  # type: ignore[arg-type]
    made: Any = ClusterPort("app", "replica", "node", settings, Manager())
    yield made
    made.close()


def report_a_step(port: Any) -> Sequence[tuple[str, tuple[Any, ...]]]:
    """A request ends at a replica; what the manager must hear of it."""
    port.report_placement([b"a"], [], False)
    port.report_rate(("prefill", 32, 0.5))
    port.report_placement([], [b"b"], False)
    port.release(7)
    port.release(8)
    port.flush(patience(PATIENCE_S))
    return (
        ("report_placement", ("replica", [([b"a"], [], False), ([], [b"b"], False)])),
        ("report_rates", ("replica", [("prefill", 32, 0.5)])),
        ("release", ([7, 8],)),
    )


def test_the_reports_of_one_step_are_one_call(port: Any) -> None:
    expected = report_a_step(port)
    assert port.manager.calls == [("batch", *expected)]
    assert {method for method, _ in expected} <= BATCHED


def test_what_makes_the_manager_wait_is_a_call_of_its_own(port: Any) -> None:
    port.release(7)
    port.report_bad(LOAD, "checksum")
    port.flush(patience(PATIENCE_S))
    assert port.manager.calls == [("batch", ("release", ([7],))), ("bad_segment", "cpu", "node", LOAD.key)]
    assert "bad_segment" not in BATCHED


def test_reports_without_a_manager_are_counted_as_lost(port: Any) -> None:
    port.manager.gone = True
    report_a_step(port)
    assert port.counters["reports_lost"] == 5
