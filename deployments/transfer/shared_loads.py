"""One load for many: a request for blocks that a load is bringing waits for it, and finds them in the prefix cache.

Requests that arrive together with one prefix, or the `n` answers to one prompt, would each load it. Instead the first
one loads, and vLLM is told "ask again" for the others (`get_num_new_matched_tokens` returns None). When the load has
ended vLLM caches its blocks in the next step, before it asks the others, which then find them on the device. What the
load did not bring they load or compute themselves.

No request waits long for little: only where at least half of the load's blocks are wanted, and `MOST_WAITS` times at
most. Every load ends, at its deadline at the latest, so every wait does. A load of a request that is aborted is left at
once, for its blocks are never cached; one of the others then loads. After a load that failed the others do not try the
same segments again: they compute. Equal block hashes are equal KV of one tenant, so no request waits for another
tenant.

On the engine thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

MOST_WAITS = 2
"""Loads that one request waits for: one may bring a system prompt, and the next one the document after it."""


@dataclass(slots=True, eq=False)
class LoadUnderWay:
    """One request's load of consecutive blocks, `hashes`, from block `first` of its sequence on."""

    first: int
    hashes: Sequence[bytes]
    ended: bool = False
    failed_at: int | None = None
    """The first block of the sequence that did not arrive; None: all arrived, or the request was aborted."""

    @property
    def end(self) -> int:
        """The first block of the sequence that the load does not bring."""
        return self.first + len(self.hashes)


@dataclass(slots=True)
class Awaited:
    """What a request waits for: a load, of which it wants the blocks before block `upto` of its sequence."""

    load: LoadUnderWay
    upto: int
    device_tokens: int
    """What the device had of the request when it began to wait."""

    @property
    def failed(self) -> bool:
        """Whether the load ended without something that is wanted."""
        return self.load.failed_at is not None and self.load.failed_at < self.upto


@dataclass(slots=True)
class SharedWait:
    """One request's waits for the loads of others, since it entered or was preempted."""

    awaited: Awaited | None = None
    """The load that it waits for, or has waited for since it was last given blocks."""
    left: int = MOST_WAITS

    @property
    def goes_on(self) -> bool:
        """Whether the load has not ended."""
        return self.awaited is not None and not self.awaited.load.ended

    @property
    def was_in_vain(self) -> bool:
        """Whether the load has not brought what is wanted."""
        return self.awaited is not None and self.awaited.failed

    def begin(self, awaited: Awaited) -> None:
        """Wait for a load; there is one wait less `left`."""
        self.awaited = awaited
        self.left -= 1

    def end(self) -> Awaited | None:
        """The request goes on, with blocks or without; return what it has waited for."""
        awaited, self.awaited = self.awaited, None
        return awaited


class SharedLoads:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._loads: dict[str, LoadUnderWay] = {}
        self._by_block: dict[bytes, LoadUnderWay] = {}

    def begin(self, request_id: str, hashes: Sequence[bytes], first: int, end: int) -> None:
        """A request loads blocks `first` to `end` of its sequence, whose block hashes are `hashes`. O(blocks)."""
        load = self._loads[request_id] = LoadUnderWay(first, hashes[first:end])
        self._by_block.update(dict.fromkeys(load.hashes, load))

    def end(self, request_id: str, failed_at: int | None = None) -> None:
        """The load of a request has ended, or the request has; one without a load is no error. O(blocks)."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        load.ended, load.failed_at = True, failed_at
        for block_hash in load.hashes:
            if self._by_block.get(block_hash) is load:
                del self._by_block[block_hash]

    def awaited(self, hashes: Sequence[bytes], first: int, end: int, device_tokens: int) -> Awaited | None:
        """Return the load to wait for, for a request that wants blocks `first` to `end`; None: it loads them itself."""
        load = self._by_block.get(hashes[first])
        if load is None:
            return None
        # Hashes are chained: what is equal at a block is equal before it, and lies at the same place.
        most = min(end, load.end)
        upto = first + bisect_left(range(first, most), True, key=lambda at: hashes[at] != load.hashes[at - load.first])
        return Awaited(load, upto, device_tokens) if 2 * (upto - first) >= len(load.hashes) else None
