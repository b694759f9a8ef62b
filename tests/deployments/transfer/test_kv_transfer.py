"""The transfer threads alone: a tier that hangs holds up nobody else, and a load always ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from own_clock import OwnClock

from deployments.protocol.kv_port import OfferedBlocks, SaveGrant
from deployments.protocol.log_lines import REQUEST_ID, lines_of
from deployments.transfer import threads as kv_transfer
from deployments.transfer.layerwise_streams import HostStreams
from deployments.transfer.threads import LOAD_THREADS, KVTransfer, LoadJob, SaveJob
from kvmanager.loading.prefix_load import segment_wait_s
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.keys import EXACT, BlockHash
from load_tests.harness.emulated_link import EmulatedLink
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import PATIENCE_S, patience, until

BLOCKS = (4, 5)
LOAD_DEADLINE_S = 2 * PATIENCE_S
"""Of a load that no test wants to be late."""


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
    transfer = KVTransfer(copier, port, max_held_blocks=8, blocks_per_segment=16, load_deadline_s=LOAD_DEADLINE_S)
    yield transfer
    port.gate.set()
    transfer.close()


def job(request_id: str, holder: str) -> LoadJob:
    return LoadJob(request_id, 1, [PlannedLoad(b"k" * 32, 0, len(BLOCKS), "cpu", holder, 500, 1000)], 0, BLOCKS)


def finished(transfer: KVTransfer) -> set[str]:
    ended: set[str] = set()
    until(lambda: ended.update(transfer.take_finished_loads()) or ended, "a load has ended")
    return ended


def test_a_load_reports_how_long_its_segments_took_by_tier(transfer: KVTransfer, port: HangingPort) -> None:
    transfer.submit_load(job("one", "node"))
    assert finished(transfer) == {"one"}
    ((kind, tier, tokens, nbytes, seconds),) = port.rates
    assert (kind, tier, tokens) == ("load", "cpu", len(BLOCKS) * 32)
    assert nbytes == 500, "as they are stored at the tier, not in memory"
    assert seconds >= 0


def test_what_a_transfer_says_names_the_http_request_that_submitted_it(
    transfer: KVTransfer, port: HangingPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []
    monkeypatch.setattr(kv_transfer.logger, "exception", lambda *_: named.append(REQUEST_ID.get()))
    monkeypatch.setattr(port, "fetch", lambda *_: 1 / 0)
    for request_id in ("order-1", ""):
        with lines_of(request_id):
            transfer.submit_load(job("one", "node"))
        assert finished(transfer) == {"one"}
    saved = threading.Event()
    with lines_of("order-2"):
        blocks = OfferedBlocks([BlockHash(b"h" * 32)], 0, 1, 1)  # the copier has no sizes: its save fails
        transfer.submit_save(SaveJob(blocks, [4], lambda: None, EXACT, lambda stored: saved.set()))
    assert saved.wait(patience(PATIENCE_S))
    assert named == ["order-1", "", "order-2"]


def test_a_load_that_hangs_does_not_hold_up_the_next_one(transfer: KVTransfer, port: HangingPort) -> None:
    transfer.submit_load(job("stuck", "slow"))
    transfer.submit_load(job("quick", "node"))

    assert finished(transfer) == {"quick"}
    assert transfer.take_failed_blocks() == set()

    port.gate.set()
    assert finished(transfer) == {"stuck"}
    assert transfer.take_failed_blocks() == set(BLOCKS)
    assert transfer.counters.loads_failed == 1


@pytest.mark.parametrize("holder", ["node", "slow"])
def test_a_load_releases_its_lease_whether_anything_came_or_not(
    transfer: KVTransfer, port: HangingPort, holder: str
) -> None:
    transfer.submit_load(replace(job("one", holder), lease_id=7))
    port.gate.set()
    assert finished(transfer) == {"one"}
    until(lambda: port.released == [7], "its lease is released")


@pytest.mark.parametrize(("within_s", "expected_s"), [(None, LOAD_DEADLINE_S), (1_000.0, 1_000.0)])
def test_a_loads_time_begins_when_it_begins(
    transfer: KVTransfer, port: HangingPort, within_s: float | None, expected_s: float
) -> None:
    for number in range(LOAD_THREADS):
        transfer.submit_load(job(str(number), "slow"))
    transfer.submit_load(replace(job("waits for a thread", "node"), within_s=within_s))
    until(lambda: len(port.deadlines) == LOAD_THREADS, "every thread loads")
    begins = time.monotonic()
    port.gate.set()
    until(lambda: "waits for a thread" in transfer.take_finished_loads(), "it has had its turn")
    assert begins + expected_s <= port.deadlines[-1] <= time.monotonic() + expected_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> OwnClock:
    """The transfers' time: a pause of this machine takes none of it."""
    clock = OwnClock()
    monkeypatch.setattr(kv_transfer, "time", clock)
    return clock


class LinkedPort(MemoryPort):
    """Segments come over a link, one after the other, and are waited for as the cluster's port does."""

    def __init__(self, link: EmulatedLink, clock: OwnClock) -> None:
        super().__init__()
        self.link, self.clock = link, clock

    def fetch(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        for load in loads:
            needs_s = self.link.seconds(load.nbytes)
            left_s = min(deadline - self.clock.monotonic(), segment_wait_s(0.05, load.nbytes))
            self.clock.sleep(max(0.0, min(needs_s, left_s)))
            yield memoryview(b"segment") if needs_s <= left_s else None


@pytest.mark.parametrize(
    ("bytes_per_s", "within_s", "arrive"),
    [(50e6, 64.0, 12), (50e6, 0.11, 5), (1e6, 64.0, 0)],
    ids=["a long load", "without its own time", "a link that brings nothing"],
)
def test_over_a_slow_link_a_long_load_comes_and_a_stuck_one_is_cut_off(
    bytes_per_s: float, within_s: float, arrive: int, clock: OwnClock
) -> None:
    """Twelve segments of 1 MB, in 0.24 s over the first link; a load that is short has 0.11 s."""
    copier: Any = SimpleNamespace(write=lambda *_: None, layout=SimpleNamespace(block_size=32))
    port = LinkedPort(EmulatedLink(bytes_per_s), clock)
    transfer = KVTransfer(copier, port, max_held_blocks=8, blocks_per_segment=16, load_deadline_s=0.1)
    loads = [PlannedLoad(bytes([number]) * 32, number, 1, "redis", "", 10**6) for number in range(12)]
    transfer.submit_load(LoadJob("one", 1, loads, 0, range(12), within_s=within_s))
    assert finished(transfer) == {"one"}
    arrived = 12 - len(transfer.take_failed_blocks())
    assert arrived == arrive
    transfer.close()


def test_a_directives_deadline_counts_from_its_order(transfer: KVTransfer, port: HangingPort) -> None:
    deadline = time.monotonic() + LOAD_DEADLINE_S
    transfer.submit_load(replace(job("one", "node"), within_s=2 * LOAD_DEADLINE_S), deadline)
    assert finished(transfer) == {"one"}
    assert port.deadlines == [deadline]


def test_a_load_that_does_not_come_to_its_turn_is_given_up(port: HangingPort, clock: OwnClock) -> None:
    copier: Any = SimpleNamespace(write=lambda *_: None, layout=SimpleNamespace(block_size=32))
    transfer = KVTransfer(copier, port, max_held_blocks=8, blocks_per_segment=16, load_deadline_s=0.05)
    for number in range(LOAD_THREADS):
        transfer.submit_load(replace(job(str(number), "slow"), within_s=64.0))
    until(lambda: len(port.deadlines) == LOAD_THREADS, "every thread loads")
    transfer.submit_load(replace(job("one", "node"), within_s=64.0))
    clock.sleep(0.1)
    port.gate.set()
    until(lambda: "one" in transfer.take_finished_loads(), "it ends when a thread looks at it")
    assert len(port.deadlines) == LOAD_THREADS, "and asks for nothing"
    assert set(BLOCKS) <= transfer.take_failed_blocks()
    transfer.close()


def test_an_error_in_a_load_does_not_end_its_thread(transfer: KVTransfer) -> None:
    def fail(port: Any) -> None:
        raise RuntimeError("nobody expected this")

    for _ in range(LOAD_THREADS):
        transfer.submit_fetch(fail)
    transfer.submit_load(job("one", "node"))
    assert finished(transfer) == {"one"}
    until(lambda: transfer.has_idle_loader, "every thread is idle again")


def test_loads_that_wait_for_a_tier_leave_no_idle_thread(transfer: KVTransfer, port: HangingPort) -> None:
    for number in range(LOAD_THREADS):
        assert transfer.has_idle_loader
        transfer.submit_load(job(str(number), "slow"))
    assert not transfer.has_idle_loader
    port.gate.set()
    until(lambda: transfer.has_idle_loader, "the loads have ended")


class NotedStreams(HostStreams):
    """Notes in which order copies are made and awaited, as a device's streams would have to."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def mark_compute(self) -> Any:
        self.seen.append("computed")
        return len(self.seen)

    @contextlib.contextmanager
    def loading(self, after: Any) -> Iterator[None]:
        self.seen.append(("on the load stream after", after))
        yield
        self.seen.append("other streams")

    def await_loads(self) -> None:
        self.seen.append("awaited")


@pytest.mark.parametrize("directed", [False, True], ids=["a request's", "a promotion"])
def test_a_load_is_finished_when_the_device_has_written_it(port: HangingPort, directed: bool) -> None:
    seen: list[Any] = []
    ended = threading.Event()

    def end(arrived: int) -> None:
        seen.append(("ended", arrived))
        ended.set()

    copier: Any = SimpleNamespace(write=lambda *_: seen.append("written"), layout=SimpleNamespace(block_size=32))
    on_load_end = (lambda: None) if directed else (lambda: end(-1))
    transfer = KVTransfer(copier, port, 8, 16, LOAD_DEADLINE_S, on_load_end=on_load_end, streams=NotedStreams(seen))
    transfer.submit_load(replace(job("one", "node"), on_end=end if directed else None))
    assert ended.wait(patience(PATIENCE_S))
    transfer.close()

    arrived = len(BLOCKS) if directed else -1
    assert seen == [
        "computed", ("on the load stream after", 1), "written", "other streams", "awaited", ("ended", arrived),
    ]  # fmt: skip


# saves


class HangingStores(MemoryPort):
    """Grants everything; what is stored hangs until `gate` opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.storing = threading.Event()

    def store(self, grant: SaveGrant, segments: Sequence[tuple[Any, Any]]) -> int:
        self.storing.set()
        self.gate.wait(patience(PATIENCE_S))
        return len(segments)


@pytest.fixture
def stores() -> Iterator[HangingStores]:
    port = HangingStores()
    yield port
    port.gate.set()


@pytest.fixture
def saving(stores: HangingStores, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVTransfer]:
    """Transfers whose first save is at a tier that hangs; it holds no block any more."""
    monkeypatch.setattr(kv_transfer, "STALLED_S", LOAD_DEADLINE_S)
    copier: Any = SimpleNamespace(
        read=lambda *_: SimpleNamespace(nbytes=1), sealed_bytes=lambda blocks: blocks, layout=None
    )
    transfer = KVTransfer(copier, stores, max_held_blocks=8, blocks_per_segment=16, load_deadline_s=LOAD_DEADLINE_S)
    assert transfer.submit_save(save(0, []))
    assert stores.storing.wait(patience(PATIENCE_S))
    yield transfer
    stores.gate.set()
    transfer.close()


def save(number: int, given_back: list[int], blocks: int = 4) -> SaveJob:
    hashes = [BlockHash(bytes([number]) * 32)] * blocks
    return SaveJob(
        OfferedBlocks(hashes, 0, blocks, blocks), list(range(blocks)), lambda: given_back.append(number), EXACT
    )


def test_a_tier_that_hangs_withholds_no_blocks(
    saving: KVTransfer, stores: HangingStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    assert saving.is_idle(), "what is being stored has been copied"
    assert saving.submit_save(save(1, given_back))
    assert saving.submit_save(save(2, given_back))
    assert not saving.submit_save(save(3, given_back)), "no more than the limit"
    assert given_back == []

    monkeypatch.setattr(kv_transfer, "STALLED_S", -1.0)
    assert not saving.submit_save(save(4, given_back))
    assert given_back == [1, 2]
    assert saving.is_idle()
    assert saving.counters.saves_dropped == 2

    stores.gate.set()
    until(lambda: saving.counters.segments_saved == 1, "the tier has come back")
    assert saving.submit_save(save(5, given_back))
    until(lambda: saving.counters.segments_saved == 2, "saves go on")
    assert given_back == [1, 2, 5]


def test_saves_that_wait_are_dropped_for_a_request_that_needs_their_blocks(saving: KVTransfer) -> None:
    given_back: list[int] = []
    saving.submit_save(save(1, given_back))
    saving.drop_waiting_saves()
    assert given_back == [1]
    assert saving.is_idle()


def test_a_segment_that_is_larger_than_the_limit_goes_alone(saving: KVTransfer) -> None:
    given_back: list[int] = []
    assert saving.blocks_that_fit() == 16, "alone it goes, as large as a segment may be"
    assert not saving.submit_save(save(1, given_back, blocks=17))
    assert saving.submit_save(save(1, given_back, blocks=9))
    assert saving.blocks_that_fit() <= 0
    assert not saving.submit_save(save(2, given_back, blocks=1))
