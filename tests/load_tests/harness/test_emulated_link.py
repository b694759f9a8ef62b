"""The emulated link: what it adds, to which calls, by a clock of the test's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.segment_store.base import StoreTimeoutError
from deployments.segment_store.redis_store import PART_BYTES
from load_tests.harness import emulated_link
from load_tests.harness.emulated_link import EmulatedLink, LinkedStore

KEY = b"k" * 32
MEGABYTE = bytes(1_000_000)


class Clock:
    """Stands still but for what is slept and what the store takes."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Store:
    """Takes `seconds` for each call."""

    def __init__(self, clock: Clock, found: bytes | None, seconds: float = 0.0) -> None:
        self._clock, self._found, self._seconds = clock, found, seconds

    def get(self, key: bytes) -> bytes | None:
        self._clock.sleep(self._seconds)
        return self._found

    def put(self, key: bytes, header: Any, body: Any) -> None:
        self._clock.sleep(self._seconds)

    def delete(self, keys: Any) -> int:
        return len(keys)

    def headers(self) -> Any:
        return iter([[]])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(emulated_link, "time", SimpleNamespace(monotonic=found.monotonic, sleep=found.sleep))
    return found


def linked(clock: Clock, found: bytes | None, seconds: float = 0.0, **link: float) -> LinkedStore:
    return LinkedStore(Store(clock, found, seconds), EmulatedLink(**link), deadline_s=1.0)


def test_a_read_takes_its_delay_and_its_bytes_at_the_links_rate(clock: Clock) -> None:
    assert linked(clock, MEGABYTE, bytes_per_s=100e6, delay_s=0.0005).get(KEY) == MEGABYTE
    assert clock.now == pytest.approx(100.0105)


def test_what_the_real_transfer_took_is_part_of_it(clock: Clock) -> None:
    linked(clock, MEGABYTE, seconds=0.004, bytes_per_s=100e6).get(KEY)
    assert clock.now == pytest.approx(100.01)


def test_a_real_transfer_that_is_slower_than_the_link_is_not_slowed(clock: Clock) -> None:
    linked(clock, MEGABYTE, seconds=0.4, bytes_per_s=100e6).get(KEY)
    assert clock.now == pytest.approx(100.4)


def test_a_write_is_paced_as_a_read(clock: Clock) -> None:
    linked(clock, None, bytes_per_s=100e6, delay_s=0.0005).put(
        KEY, MEGABYTE[:256], memoryview(MEGABYTE)[256:].cast("I")
    )
    assert clock.now == pytest.approx(100.0105)


def test_what_is_not_there_costs_a_round_trip(clock: Clock) -> None:
    assert linked(clock, None, bytes_per_s=1e6, delay_s=0.25).get(KEY) is None
    assert clock.now == pytest.approx(100.25)


def test_deleting_and_listing_cost_a_round_trip(clock: Clock) -> None:
    store = linked(clock, None, bytes_per_s=1e6, delay_s=0.25)
    assert store.delete([KEY]) == 1
    assert list(store.headers()) == [[]]
    assert clock.now == pytest.approx(100.5)


def test_each_part_of_a_large_segment_is_a_round_trip() -> None:
    assert EmulatedLink(delay_s=1.0).seconds(2 * PART_BYTES + 1) == 3.0


def test_a_round_trip_beyond_the_deadline_ends_at_the_deadline(clock: Clock) -> None:
    with pytest.raises(StoreTimeoutError):
        linked(clock, MEGABYTE, delay_s=5.0).get(KEY)
    assert clock.now == pytest.approx(101.0)


def test_a_link_is_said_in_words() -> None:
    assert str(EmulatedLink(100e6, 0.0005)) == "0.5 ms, 100 MB/s per connection"
    assert str(EmulatedLink(delay_s=0.002)) == "2 ms, no limit of its rate"


def test_a_link_is_throttled_while_it_is_used(clock: Clock, tmp_path: Path) -> None:
    link = EmulatedLink(control_file=str(tmp_path / "link"))
    link.throttle(100e6)
    store = LinkedStore(Store(clock, MEGABYTE), link, deadline_s=1.0)
    store.get(KEY)
    assert clock.now == pytest.approx(100.01)
    link.throttle(1e6, 0.5)
    store.get(KEY)
    assert clock.now == pytest.approx(101.51)
    link.throttle(0.0)
    store.get(KEY)
    assert clock.now == pytest.approx(101.51)


def test_a_shared_link_takes_one_call_after_the_other_and_each_waits_for_its_own_end(
    clock: Clock, tmp_path: Path
) -> None:
    link = EmulatedLink(control_file=str(tmp_path / "link"), shared=True)
    link.throttle(100e6, 0.001)
    now = link.now()
    assert now.shared
    assert now.end(100.0, 1_000_000) == pytest.approx(100.011)
    assert now.end(100.0, 1_000_000) == pytest.approx(100.021)  # another process's, at the same time
    assert now.end(101.0, 500_000) == pytest.approx(101.006)
    store = LinkedStore(Store(clock, MEGABYTE), link, deadline_s=1.0)
    clock.now = 101.002
    store.get(KEY)
    assert clock.now == pytest.approx(101.016)
    link.throttle(0.0)
    store.get(KEY)
    assert clock.now == pytest.approx(101.016)
