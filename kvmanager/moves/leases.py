"""Leases: promises with an end that what a plan handed out stays where it is.

Until a lease is released or its time has passed, none of its copies is evicted. A holder that dies without releasing
delays evictions by that time at most. Leases end in the order of a heap, so expiring costs only what expires.

`Numbers` gives numbers to these and all other promises. What was promised is given back by its number, perhaps after
the manager has died, to the next one, to which it must mean nothing. So numbers begin at a place that follows from the
manager's epoch, one of 2^48: two managers would have to give a large part of them all to meet. One thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from heapq import heappop, heappush

from kvmanager.index.catalog import Catalog
from kvmanager.index.counters import Counters
from kvmanager.index.nodes import Copy

_NUMBER_BYTES = 6


class Numbers:
    """Those of one manager, none of them 0. ``epoch``: a number that no other manager of this server ever had."""

    def __init__(self, epoch: int) -> None:
        self._last = int.from_bytes(sha256(str(epoch).encode()).digest()[:_NUMBER_BYTES])

    def next(self) -> int:
        """Return a number that was not given before."""
        self._last += 1
        return self._last


@dataclass(slots=True)
class _Lease:
    replica: str
    made: float
    deadline: float
    copies: Sequence[Copy]


class Leases:
    """See the module's docstring. ``lease_s``: how long one lasts that is not extended."""

    def __init__(self, catalog: Catalog, counters: Counters, lease_s: float, numbers: Numbers) -> None:
        self._catalog = catalog
        self._counters = counters
        self._lease_s = lease_s
        self._leases: dict[int, _Lease] = {}
        self._ends: list[tuple[float, int]] = []
        """A heap of when leases end, by their ids; of one that was released, until then."""
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._leases)

    def begin(self, now: float, replica: str, copies: Sequence[Copy]) -> int:
        """Keep RESIDENT copies, of which one may come twice, where they are; return the lease's id.

        0, and no lease, for no copies.
        """
        if not copies:
            return 0
        for copy in copies:
            self._catalog.lease(copy)
        lease_id = self._numbers.next()
        self._leases[lease_id] = _Lease(replica, now, now + self._lease_s, copies)
        heappush(self._ends, (now + self._lease_s, lease_id))
        return lease_id

    def release(self, lease_id: int) -> list[Copy]:
        """End a lease, if it has not ended yet; return the copies whose eviction waited for it."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return []
        return [copy for copy in lease.copies if self._catalog.unlease(copy)]

    def extend(self, lease_id: int, seconds: float) -> None:
        """Let a lease end ``seconds`` later; one that has ended is no error."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.deadline += seconds

    def expire(self, now: float) -> list[Copy]:
        """End the leases whose time is over; return the copies whose eviction waited for them. O(expired)."""
        freed: list[Copy] = []
        while self._ends and self._ends[0][0] <= now:
            _, lease_id = heappop(self._ends)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.deadline > now:
                heappush(self._ends, (lease.deadline, lease_id))  # it was extended
            elif lease is not None:
                self._counters.expired_leases += 1
                freed += self.release(lease_id)
        return freed

    def forget_replica(self, replica: str) -> list[Copy]:
        """End the leases of a replica that is gone; return the copies whose eviction waited for them. O(leases)."""
        orphaned = [lease_id for lease_id, lease in self._leases.items() if lease.replica == replica]
        return [copy for lease_id in orphaned for copy in self.release(lease_id)]

    def oldest_s(self, now: float) -> float:
        """Return the age in seconds of the oldest lease, 0 without any."""
        oldest = next(iter(self._leases.values()), None)
        return 0.0 if oldest is None else now - oldest.made
