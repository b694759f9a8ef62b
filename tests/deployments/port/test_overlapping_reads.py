"""Reads of segments that overlap: one may begin before the one ahead of it, which has been handed on already."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from deployments.port import tier_reader
from deployments.port.calls import PortWaits
from deployments.port.tier_reader import TierReader
from kvmanager.moves.plan import PlannedLoad
from load_tests.harness.patience import patience

LOADS = [
    PlannedLoad(key * 32, start_block, num_blocks, "redis", "", 100, 100)
    for key, start_block, num_blocks in ((b"a", 0, 5), (b"b", 5, 3), (b"c", 3, 7))
]
"""As a plan has them where two nodes cut a sequence otherwise: blocks 0 to 4, 5 to 7, and 3 to 9, for 8 and 9."""


class Tier:
    """`handle.prefetch.remote(...)`, as a worker: it answers with a reference per segment, which is its key."""

    def __init__(self) -> None:
        self.prefetch = self
        self.asked: list[list[bytes]] = []

    def remote(self, replica: str, wanted: list[tuple[bytes, int]], late: bytes | None = None) -> list[bytes]:
        self.asked.append([key for key, _ in wanted])
        return self.asked[-1]


@pytest.mark.parametrize("late", [load.key for load in LOADS])
def test_a_late_segment_is_brought_wherever_it_begins(monkeypatch: pytest.MonkeyPatch, late: bytes) -> None:
    tier, times_late, counted = Tier(), 1, []

    def get(ref: Any, timeout: float) -> Any:
        nonlocal times_late
        if ref == late and times_late:
            times_late -= 1
            raise ray.exceptions.GetTimeoutError
        return ref

    fake = SimpleNamespace(
        get=get,
        wait=lambda refs, timeout, fetch_local: (refs, []),
        get_actor=lambda name, namespace: tier,
        exceptions=ray.exceptions,
    )
    monkeypatch.setattr(tier_reader, "ray", fake)
    reader = TierReader("app", "replica", "node", counted.append, lambda what, load: None, PortWaits(), {"redis": 1.0})

    found = list(reader.read(LOADS, time.monotonic() + patience(60.0)))

    assert [bytes(sealed) for sealed in found if sealed is not None] == [load.key for load in LOADS]
    after = [load.key for load in LOADS][[load.key for load in LOADS].index(late) :]
    assert tier.asked[1:] == ([after] if len(after) > 1 else []), (
        "only what is still to come is asked of another worker"
    )


def test_a_load_of_many_short_segments_costs_as_much_for_each_as_one_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of many short turns has a segment or two for each."""
    looks = 0

    class Place(tier_reader._Place):
        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            return super().__hash__()

    tier = SimpleNamespace(fetch=SimpleNamespace(remote=lambda keys: keys))
    fake = SimpleNamespace(
        get=lambda ref, timeout: ref, get_actor=lambda name, namespace: tier, exceptions=ray.exceptions
    )
    monkeypatch.setattr(tier_reader, "ray", fake)
    monkeypatch.setattr(tier_reader, "_Place", Place)
    loads = [PlannedLoad(at.to_bytes(32, "little"), at, 1, "cpu", "node", 100) for at in range(1000)]
    reader = TierReader("app", "replica", "node", lambda what: None, lambda what, load: None, PortWaits(), {"cpu": 1.0})
    assert len(list(reader.read(loads, time.monotonic() + patience(60.0)))) == 1000
    assert looks <= 10 * len(loads)
