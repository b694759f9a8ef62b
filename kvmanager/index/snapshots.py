"""Snapshots: the whole placement for a mirror that has lost touch, told in parts of a bounded size.

A part says what is where of some segments, or device blocks, *now*; between two parts the mirror gets the events that
happened meanwhile, as always. When the last part is there, the mirror is the placement: of each segment it has heard
every event since its part, and events say the same however often they are heard; a segment that came after the snapshot
was begun is in no part, and all that happened to it is in the events.

A mirror that asks for another part than the next (an answer was lost) gets a new snapshot. Where `MOST_AT_ONCE` are
open a mirror waits for its turn: if it ended another mirror's snapshot, more mirrors than that would all begin again
for ever. A snapshot that its mirror asks nothing of for `IDLE_S` ends. One thread.
"""

from dataclasses import dataclass, field, replace

from kvmanager.index.catalog import Catalog
from kvmanager.index.deltas import HASHES_PER_EVENT, DeltaLog, Deltas, Event, Part, Position
from kvmanager.index.device_index import DeviceIndex
from kvmanager.index.stores import Walk
from kvmanager.segments.keys import BlockHash

MOST_TOLD = 4096
"""Segments and device blocks looked at for one part: a few milliseconds, and some 200 kB for each place they lie at."""
MOST_AT_ONCE = 8
"""Snapshots under way."""
IDLE_S = 5.0
"""Many times as long as a router needs between two parts. One that is gone takes a turn no longer than this."""


@dataclass(slots=True)
class _Snapshot:
    """What is still to be told: segments, and then the pools of `replicas`, one after the other."""

    walks: list[Walk]
    replicas: list[str]
    asked: float
    """When its last part was told, in seconds of the manager's clock."""
    pool: list[BlockHash] = field(default_factory=list)
    """What the last of `replicas` held when its turn came, and has not been told."""
    next_part: int = 0


class Snapshots:
    """Those under way, by number."""

    def __init__(self, catalog: Catalog, devices: DeviceIndex) -> None:
        self._catalog = catalog
        self._devices = devices
        self._under_way: dict[int, _Snapshot] = {}
        self._last_id = 0
        self._now = 0.0

    def expire(self, now: float) -> None:
        """End those that are not asked for any more. To be called every second or so."""
        self._now = now
        for number in [number for number, found in self._under_way.items() if now - found.asked >= IDLE_S]:
            self._end(number)

    def part(self, snapshot_id: int, number: int) -> Part | None:
        """Return a part of a snapshot; the first of a new one if that is not the next; None while too many are told.

        O(`MOST_TOLD`, and the blocks of one replica); to begin one O(locations, tenants and replicas).
        """
        snapshot = self._under_way.get(snapshot_id)
        if snapshot is None or snapshot.next_part != number:
            self._end(snapshot_id)
            if len(self._under_way) >= MOST_AT_ONCE:
                return None
            snapshot_id, snapshot = self._begin()
        snapshot.asked = self._now
        events: list[Event] = []
        room = MOST_TOLD
        while snapshot.walks and room > 0:
            walk = snapshot.walks[-1]
            copy = walk.copy
            if copy is None:
                snapshot.walks.pop().end()
                continue
            walk.copy = copy.later
            room -= 1
            if copy.resident:
                node, (tier, holder) = copy.node, copy.store.location
                events.append(("seg+", tier.value, holder, node.key, node.start_block, node.marks))
        while snapshot.replicas and room > 0:
            replica = snapshot.replicas[-1]
            held = self._devices.held(replica)
            if not snapshot.pool:
                snapshot.pool = list(held)
            told = snapshot.pool[-HASHES_PER_EVENT:]
            del snapshot.pool[-HASHES_PER_EVENT:]
            room -= max(1, len(told))
            if still_there := [block for block in told if block in held]:
                events.append(("dev+", replica, still_there))
            if not snapshot.pool:
                snapshot.replicas.pop()
        snapshot.next_part += 1
        last = not snapshot.walks and not snapshot.replicas
        if last:
            self._end(snapshot_id)
        return Part(snapshot_id, snapshot.next_part - 1, last, events)

    def _end(self, snapshot_id: int) -> None:
        snapshot = self._under_way.pop(snapshot_id, None)
        for walk in snapshot.walks if snapshot is not None else ():
            walk.end()

    def _begin(self) -> tuple[int, _Snapshot]:
        self._last_id += 1
        replicas = [replica for replica, _ in self._devices.replicas()]
        walks = [Walk(share) for store in self._catalog.stores.values() for share in store.shares.values()]
        snapshot = self._under_way[self._last_id] = _Snapshot(walks, replicas, self._now)
        return self._last_id, snapshot


def deltas_since(epoch: int, log: DeltaLog, snapshots: Snapshots, seen: Position, limit: int) -> Deltas:
    """What a mirror is told next: events about ``limit`` segments and blocks at most, or one event.

    Where some are lost a snapshot begins, as soon as it has its turn; while it is told, each answer that has all events
    brings a part of it. O(limit + part).
    """
    events = log.since(seen.seq, limit)
    if events is None:
        return _with_part(Deltas(epoch, log.last + 1, log.last, []), snapshots.part(0, 0))
    last = seen.seq + len(events)
    told = Deltas(epoch, seen.seq + 1, last, events, more=last < log.last)
    if told.more or not seen.snapshot_id:
        return told
    return _with_part(told, snapshots.part(seen.snapshot_id, seen.part))


def _with_part(told: Deltas, part: Part | None) -> Deltas:
    if part is None:
        return replace(told, more=True, waits=True)
    return replace(told, part=part, more=not part.last)
