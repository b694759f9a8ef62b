"""A slow network in front of a fast Redis: for measurements and tests on one machine, never in production.

Each call of a `SegmentStore` holds one connection from its request to the last byte of its answer. So pacing each call
paces each connection: a call takes at least one delay per round trip and its bytes at the link's rate. What the real
transfer took is part of that; two calls at a time are two connections, and have the rate twice, as with a network whose
limit is the single connection (its window, its share at a proxy, one core's TLS) and not the sum. A `shared` link is
the other case, a network card's: its calls' bytes go one call after the other, whichever process makes them.

A link may be throttled while it is used: through a file that every call reads (`EmulatedLink.control_file`), for the
calls come from several processes.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deployments.segment_store.base import OwnBuffer, SegmentStore, StoredHeader, StoreTimeoutError
from deployments.segment_store.redis_store import PART_BYTES
from kvmanager.segments.format import Buffer


@dataclass(frozen=True, slots=True)
class EmulatedLink:
    """Bytes per second of each connection (0: as fast as it is), and seconds that each round trip takes longer."""

    bytes_per_s: float = 0.0
    delay_s: float = 0.0
    control_file: str = ""
    """A file whose two numbers, as `throttle` writes them, replace those above at each call."""
    shared: bool = False
    """All connections share the rate. Needs a `control_file`: the processes agree by a file next to it."""

    def __bool__(self) -> bool:
        return bool(self.bytes_per_s or self.delay_s or self.control_file)

    def throttle(self, bytes_per_s: float, delay_s: float = 0.0) -> None:
        """Let all calls from now on, in any process, find another link. Needs a `control_file`."""
        path = Path(self.control_file)
        temporary = path.with_suffix(".new")
        temporary.write_text(f"{bytes_per_s!r} {delay_s!r}", encoding="utf-8")
        temporary.replace(path)  # no call reads half of it

    def now(self) -> EmulatedLink:
        """The link as it is for a call that begins now."""
        if not self.control_file:
            return self
        bytes_per_s, delay_s = map(float, Path(self.control_file).read_text(encoding="utf-8").split())
        return replace(self, bytes_per_s=bytes_per_s, delay_s=delay_s)

    def seconds(self, nbytes: int) -> float:
        """Return the least time for a segment of `nbytes`: a round trip for each of its parts."""
        round_trips = max(1, -(-nbytes // PART_BYTES))
        return round_trips * self.delay_s + (nbytes / self.bytes_per_s if self.bytes_per_s else 0.0)

    def end(self, began: float, nbytes: int) -> float:
        """When a call that began then is over at the earliest, by `time.monotonic`, which all processes share."""
        if not (self.shared and self.bytes_per_s):
            return began + self.seconds(nbytes)
        taken = nbytes / self.bytes_per_s
        with Path(f"{self.control_file}.until").open("a+", encoding="utf-8") as books:
            fcntl.flock(books, fcntl.LOCK_EX)
            books.seek(0)
            until = max(began, float(books.read() or 0.0)) + taken
            books.truncate(0)
            books.write(repr(until))
        return until + self.seconds(nbytes) - taken

    def __str__(self) -> str:
        whose = "for all" if self.shared else "per connection"
        rate = f"{self.bytes_per_s / 1e6:g} MB/s {whose}" if self.bytes_per_s else "no limit of its rate"
        return f"{1000 * self.delay_s:g} ms, {rate}"

    def before(self, store: SegmentStore, deadline_s: float) -> SegmentStore:
        """See `load_tests.harness.disturbed_redis.Disturbance`."""
        return LinkedStore(store, self, deadline_s) if self else store


NO_LINK = EmulatedLink()


class LinkedStore:
    """Any `SegmentStore` behind an emulated link. Listing headers is slowed by one round trip."""

    def __init__(self, inner: SegmentStore, link: EmulatedLink, deadline_s: float) -> None:
        self._inner = inner
        self._link = link
        self._deadline_s = deadline_s

    def get(self, key: bytes) -> OwnBuffer | None:
        """See `SegmentStore.get`."""
        link, began = self._begin()
        sealed = self._inner.get(key)
        _pace(link, began, len(sealed or b""))
        return sealed

    def put(self, key: bytes, header: Buffer, body: Buffer) -> None:
        """See `SegmentStore.put`."""
        link, began = self._begin()
        self._inner.put(key, header, body)
        _pace(link, began, memoryview(header).nbytes + memoryview(body).nbytes)

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `SegmentStore.delete`."""
        link, began = self._begin()
        deleted = self._inner.delete(keys)
        _pace(link, began, 0)
        return deleted

    def headers(self) -> Iterator[list[StoredHeader]]:
        """See `SegmentStore.headers`."""
        _pace(self._link.now(), time.monotonic(), 0)
        return self._inner.headers()

    def _begin(self) -> tuple[EmulatedLink, float]:
        """The link, and when the call began. A round trip beyond the deadline ends there, as with a Redis that far."""
        link = self._link.now()
        if link.delay_s > self._deadline_s:
            time.sleep(self._deadline_s)
            raise StoreTimeoutError("Redis does not answer in time (emulated link)")
        return link, time.monotonic()


def _pace(link: EmulatedLink, began: float, nbytes: int) -> None:
    time.sleep(max(0.0, link.end(began, nbytes) - time.monotonic()))
