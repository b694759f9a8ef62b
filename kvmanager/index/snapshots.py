"""Snapshots: the whole placement for a mirror that has lost touch, told in parts of a bounded size.

A part says what is where of some segments, or device blocks, *now*; between two parts the mirror gets the events that
happened meanwhile, as always. When the last part is there, the mirror is the placement: of each segment it has heard
every event since its part, and events say the same however often they are heard; a segment that came after the snapshot
was begun is in no part, and all that happened to it is in the events.

Who asks for another part than the next one (an answer was lost) gets a new snapshot. One thread.
"""

from dataclasses import dataclass

from kvmanager.index.catalog import Catalog
from kvmanager.index.deltas import HASHES_PER_EVENT, DeltaLog, Deltas, Event, Part, Position
from kvmanager.index.device_index import DeviceIndex
from kvmanager.index.stores import Walk
from kvmanager.segments.keys import BlockHash

MOST_TOLD = 4096
"""Segments and device blocks looked at for one part: a few milliseconds, and some 200 kB for each place they lie at."""
MOST_AT_ONCE = 8
"""Snapshots under way; when another one begins, the oldest is given up."""


@dataclass(slots=True)
class _Snapshot:
    """What is still to be told: segments, and then device blocks."""

    walks: list[Walk]
    blocks: list[tuple[str, list[BlockHash]]]
    next_part: int = 0


class Snapshots:
    """Those under way, by number."""

    def __init__(self, catalog: Catalog, devices: DeviceIndex) -> None:
        self._catalog = catalog
        self._devices = devices
        self._under_way: dict[int, _Snapshot] = {}
        self._last_id = 0

    def part(self, snapshot_id: int, number: int) -> Part:
        """Return a part of a snapshot; the first of a new one if that is not the next.

        O(`MOST_TOLD`), and to begin one O(locations, tenants and device blocks).
        """
        snapshot = self._under_way.get(snapshot_id)
        if snapshot is None or snapshot.next_part != number:
            self._end(snapshot_id)
            snapshot_id, snapshot = self._begin()
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
        while snapshot.blocks and room > 0:
            replica, blocks = snapshot.blocks.pop()
            room -= len(blocks)
            held = self._devices.held(replica)
            if still_there := [block for block in blocks if block in held]:
                events.append(("dev+", replica, still_there))
        snapshot.next_part += 1
        last = not snapshot.walks and not snapshot.blocks
        if last:
            self._end(snapshot_id)
        return Part(snapshot_id, snapshot.next_part - 1, last, events)

    def _end(self, snapshot_id: int) -> None:
        snapshot = self._under_way.pop(snapshot_id, None)
        for walk in snapshot.walks if snapshot is not None else ():
            walk.end()

    def _begin(self) -> tuple[int, _Snapshot]:
        if len(self._under_way) >= MOST_AT_ONCE:
            self._end(next(iter(self._under_way)))
        self._last_id += 1
        pools = [(replica, list(held)) for replica, held in self._devices.replicas()]
        blocks = [
            (replica, pool[start : start + HASHES_PER_EVENT])
            for replica, pool in pools
            for start in range(0, len(pool), HASHES_PER_EVENT)
        ]
        walks = [Walk(share) for store in self._catalog.stores.values() for share in store.shares.values()]
        snapshot = self._under_way[self._last_id] = _Snapshot(walks, blocks)
        return self._last_id, snapshot


def deltas_since(epoch: int, log: DeltaLog, snapshots: Snapshots, seen: Position, limit: int) -> Deltas:
    """What a mirror is told next: events about ``limit`` segments and blocks at most, or one event.

    Where some are lost a snapshot begins; while it is told, each answer that has all events brings a part of it.
    O(limit + part).
    """
    events = log.since(seen.seq, limit)
    if events is None:
        part = snapshots.part(0, 0)
        return Deltas(epoch, log.last + 1, log.last, [], part, more=not part.last)
    last = seen.seq + len(events)
    if last < log.last or not seen.snapshot_id:
        return Deltas(epoch, seen.seq + 1, last, events, more=last < log.last)
    part = snapshots.part(seen.snapshot_id, seen.part)
    return Deltas(epoch, seen.seq + 1, last, events, part, more=not part.last)
