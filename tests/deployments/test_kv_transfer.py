"""The transfer threads alone: a tier that hangs holds up nobody else, and a load always ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from memory_port import MemoryPort

from deployments.kv_port import PlannedLoad
from deployments.kv_transfer import KVTransfer, LoadJob

BLOCKS = (4, 5)


class HangingPort(MemoryPort):
    """Segments whose holder is `slow` do not come before `gate` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.deadlines: list[float] = []

    def fetch(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        self.deadlines.append(deadline)
        if loads[0].holder == "slow":
            self.gate.wait()
            yield None
        else:
            yield memoryview(b"segment")


@pytest.fixture
def port() -> Iterator[HangingPort]:
    port = HangingPort()
    yield port
    port.gate.set()


@pytest.fixture
def transfer(port: HangingPort) -> Iterator[KVTransfer]:
    copier: Any = SimpleNamespace(write=lambda *_: None, layout=SimpleNamespace(block_size=32))
    transfer = KVTransfer(copier, port, max_held_blocks=8, load_deadline_s=5.0)
    yield transfer
    port.gate.set()
    transfer.close()


def job(request_id: str, holder: str) -> LoadJob:
    return LoadJob(request_id, 1, [PlannedLoad(b"k" * 32, 0, len(BLOCKS), "cpu", holder, 500, 1000)], 0, BLOCKS)


def finished(transfer: KVTransfer) -> set[str]:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if ended := transfer.take_finished_loads():
            return ended
        time.sleep(0.005)
    raise AssertionError("no load has ended")


def test_a_load_reports_how_long_its_segments_took_by_tier(transfer: KVTransfer, port: HangingPort) -> None:
    transfer.submit_load(job("one", "node"))
    assert finished(transfer) == {"one"}
    ((kind, tier, tokens, nbytes, seconds),) = port.rates
    assert (kind, tier, tokens) == ("load", "cpu", len(BLOCKS) * 32)
    assert nbytes == 500, "as they are stored at the tier, not in memory"
    assert seconds >= 0


def test_a_load_that_hangs_does_not_hold_up_the_next_one(transfer: KVTransfer, port: HangingPort) -> None:
    transfer.submit_load(job("stuck", "slow"))
    transfer.submit_load(job("quick", "node"))

    assert finished(transfer) == {"quick"}
    assert transfer.take_failed_blocks() == set()

    port.gate.set()
    assert finished(transfer) == {"stuck"}
    assert transfer.take_failed_blocks() == set(BLOCKS)
    assert transfer.counters.loads_failed == 1


def test_the_time_that_a_load_waits_for_its_turn_counts_against_its_deadline(
    transfer: KVTransfer, port: HangingPort
) -> None:
    before = time.monotonic()
    transfer.submit_load(job("one", "node"))
    after = time.monotonic()

    assert finished(transfer) == {"one"}
    assert before + 5.0 <= port.deadlines[0] <= after + 5.0
