"""Fault injection: a store that is slow, fails, or returns damaged bytes, as often as it is told.

It lies below `CheckedStore`, so that a damaged segment meets the same check as one that Redis has damaged.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deployments.link_emulation import NO_LINK, EmulatedLink
from deployments.segment_store import OwnBuffer, SegmentStore, StoredHeader, StoreTimeoutError, StoreUnavailableError
from kvmanager.segment_format import Buffer


@dataclass(frozen=True, slots=True)
class StoreFaults:
    """How a store misbehaves: delay of each call in seconds, shares (0..1) of calls that fail and of damaged reads.

    `link` is no misbehaviour but a network that this machine does not have (`deployments.link_emulation`).
    """

    delay_s: float = 0.0
    error_share: float = 0.0
    corrupt_share: float = 0.0
    link: EmulatedLink = NO_LINK

    def __bool__(self) -> bool:
        """Whether calls misbehave; a link alone does not count."""
        return bool(self.delay_s or self.error_share or self.corrupt_share)


NO_FAULTS = StoreFaults()


class FaultyStore:
    """Any `SegmentStore` with faults. Listing headers is slowed once, never failed: the index can always be built.

    A delay beyond `deadline_s` ends at the deadline with StoreTimeoutError, as a Redis that slow would.
    """

    def __init__(self, inner: SegmentStore, faults: StoreFaults, deadline_s: float, rng: random.Random) -> None:
        self._inner = inner
        self._faults = faults
        self._deadline_s = deadline_s
        self._rng = rng
        self._lock = threading.Lock()

    def get(self, key: bytes) -> OwnBuffer | None:
        """Damages one byte, wherever it is."""
        self._misbehave()
        sealed = self._inner.get(key)
        if sealed and self._drawn(self._faults.corrupt_share):
            sealed[int(self._draw() * len(sealed))] ^= 0xFF
        return sealed

    def put(self, key: bytes, header: Buffer, body: Buffer) -> None:
        """See `SegmentStore.put`."""
        self._misbehave()
        self._inner.put(key, header, body)

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `SegmentStore.delete`."""
        self._misbehave()
        return self._inner.delete(keys)

    def headers(self) -> Iterator[list[StoredHeader]]:
        """See `SegmentStore.headers`."""
        time.sleep(min(self._faults.delay_s, self._deadline_s))
        return self._inner.headers()

    def _misbehave(self) -> None:
        time.sleep(min(self._faults.delay_s, self._deadline_s))
        if self._faults.delay_s > self._deadline_s:
            raise StoreTimeoutError("Redis does not answer in time (injected fault)")
        if self._drawn(self._faults.error_share):
            raise StoreUnavailableError("Redis cannot be reached (injected fault)")

    def _drawn(self, share: float) -> bool:
        return bool(share) and self._draw() < share

    def _draw(self) -> float:
        with self._lock:
            return self._rng.random()
