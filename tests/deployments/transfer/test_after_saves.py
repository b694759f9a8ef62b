"""Who waits for the saves before it is told when they have ended, or that nobody can say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.engine.process.service import ReuseService
from deployments.protocol.kv_port import OfferedBlocks, SaveGrant
from deployments.transfer import threads as kv_transfer
from deployments.transfer.held_save import after_saves
from deployments.transfer.threads import KVTransfer, SaveJob
from kvmanager.segments.keys import EXACT, BlockHash
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience


class GatedPort(MemoryPort):
    """No offer is answered before `gate` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.offers = 0

    def offer(self, offered: OfferedBlocks, segment_bytes: Sequence[int]) -> SaveGrant | None:
        self.offers += 1
        self.gate.wait(patience(20))
        return None


@pytest.fixture
def port() -> Iterator[GatedPort]:
    port = GatedPort()
    yield port
    port.gate.set()


@pytest.fixture
def transfer(port: GatedPort) -> Iterator[KVTransfer]:
    copier: Any = SimpleNamespace(layout=SimpleNamespace(block_size=32), sealed_bytes=lambda blocks: 100 * blocks)
    transfer = KVTransfer(copier, port, max_held_blocks=4, blocks_per_segment=4, load_deadline_s=5.0)
    yield transfer
    port.gate.set()
    transfer.close()


def save(transfer: KVTransfer, ended: list[str]) -> bool:
    offered = OfferedBlocks([BlockHash(b"h" * 32)] * 4, 0, 4, 4, "")
    return transfer.submit_save(
        SaveJob(offered, (1, 2, 3, 4), lambda: None, EXACT, lambda stored: ended.append("save"))
    )


def service(transfer: KVTransfer) -> ReuseService:
    reuse: Any = SimpleNamespace(transfer=transfer, control=None, call=None)
    nobody: Any = None
    return ReuseService(reuse, nobody)


def test_it_is_told_after_the_saves_before_it_and_offers_nothing_itself(port: GatedPort, transfer: KVTransfer) -> None:
    order: list[str] = []
    told = threading.Event()
    assert save(transfer, order)
    assert after_saves(transfer, lambda: (order.append("told"), told.set()))
    assert not told.wait(0.05)
    port.gate.set()
    assert told.wait(patience(20))
    assert (order, port.offers) == (["save", "told"], 1)


def test_a_save_that_is_dropped_has_ended_too(port: GatedPort, transfer: KVTransfer) -> None:
    told = threading.Event()
    save(transfer, [])
    assert after_saves(transfer, told.set)
    transfer.drop_waiting_saves()
    assert told.is_set()
    port.gate.set()


def test_behind_a_tier_that_hangs_nobody_waits(
    port: GatedPort, transfer: KVTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer, "STALLED_S", -1.0)
    transfer._storing_since = 0.0
    assert not after_saves(transfer, lambda: None)
    assert not asyncio.run(service(transfer).saved(20.0))


def test_a_replica_waits_for_its_saves_and_no_longer_than_it_may(port: GatedPort, transfer: KVTransfer) -> None:
    async def check() -> None:
        asked = service(transfer)
        assert await asked.saved(20.0), "nothing is being saved"
        save(transfer, [])
        assert not await asked.saved(0.01)
        waiting = asyncio.create_task(asked.saved(20.0))
        await asyncio.sleep(0.02)
        port.gate.set()
        assert await waiting

    asyncio.run(check())


def test_an_answer_that_comes_too_late_harms_nobody(port: GatedPort, transfer: KVTransfer) -> None:
    save(transfer, [])
    assert not asyncio.run(service(transfer).saved(0.01))
    port.gate.set()
    told = threading.Event()
    assert after_saves(transfer, told.set), "its loop is closed by now"
    assert told.wait(patience(20)), "the save thread lives on"
