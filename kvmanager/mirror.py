"""A router's copy of the placement, kept up to date by deltas, so that routing a request asks nobody.

A mirror may be late, never inconsistent: it applies events strictly in order. When some are missing, or the manager is
a new one, it refuses them and asks for a snapshot, serving its last view until that comes. Being late costs a worse
choice of replica and nothing else, for plans are made by the manager. One thread.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvmanager.deltas import NOTHING_SEEN, Deltas, Event
from kvmanager.device_index import DeviceIndex
from kvmanager.keys import BlockHash, SegmentKey
from kvmanager.locations import Tier
from kvmanager.prefix_reach import prefix_reach


class TierHits(NamedTuple):
    """Leading blocks of a prompt, each counted at the fastest tier that a replica can take it from."""

    device: int
    cpu: int
    redis: int


class PlacementMirror:
    """What is where, as of event `seq` of the manager. Poll with ``apply(manager.deltas_since(mirror.seq, limit))``."""

    def __init__(self, blocks_per_segment: int) -> None:
        self.seq = NOTHING_SEEN
        self._blocks_per_segment = blocks_per_segment
        self._epoch: int | None = None
        self._devices = DeviceIndex()
        self._shared: dict[tuple[str, str], set[SegmentKey | BlockHash]] = {}

    def apply(self, deltas: Deltas) -> bool:
        """Apply events; False if they do not follow what is known. `seq` then asks for a snapshot. O(events)."""
        if deltas.snapshot:
            self._devices = DeviceIndex()
            self._shared = {}
        elif deltas.epoch != self._epoch or deltas.first != self.seq + 1:
            self.seq = NOTHING_SEEN
            return False
        for event in deltas.events:
            self._apply(event)
        self._epoch, self.seq = deltas.epoch, deltas.last
        return True

    def coverage(self, hashes: Sequence[BlockHash], replica: str) -> TierHits:
        """Return what one replica would find of a prompt; see `coverages`."""
        return self.coverages(hashes, [replica])[replica]

    def coverages(
        self, hashes: Sequence[BlockHash], replicas: Iterable[str], exact_hashes: Sequence[BlockHash] = ()
    ) -> dict[str, TierHits]:
        """Return what each replica would find of a prompt: on its device, then what CPU tiers and then Redis add.

        ``exact_hashes``: of the same tokens, where a tolerant prompt may read them too: in shared tiers, for an
        engine's own cache knows no other name for a block. O(blocks found on devices), for a device may have holes, and
        O(log segments) for each shared location.
        """
        in_cpu, in_redis = (
            max(self._reach(hashes, tier), self._reach(exact_hashes, tier)) for tier in (Tier.CPU, Tier.REDIS)
        )
        found: dict[str, TierHits] = {}
        for replica in replicas:
            device = self._devices.leading_blocks(replica, hashes)
            cpu = max(device, in_cpu)
            found[replica] = TierHits(device, cpu - device, max(cpu, in_redis) - cpu)
        return found

    def _reach(self, hashes: Sequence[BlockHash], tier: Tier) -> int:
        reaches = (
            prefix_reach(hashes, self._blocks_per_segment, held.__contains__)
            for (held_tier, _), held in self._shared.items()
            if held_tier == tier.value
        )
        return max(reaches, default=0)

    def _apply(self, event: Event) -> None:
        match event:
            case ("seg+", tier, holder, key, _, _):
                self._shared.setdefault((tier, holder), set()).add(key)
            case ("seg-", tier, holder, key):
                self._shared.setdefault((tier, holder), set()).discard(key)
            case ("seg0", tier, holder):
                self._shared.pop((tier, holder), None)
            case ("dev+", replica, blocks):
                self._devices.stored(replica, blocks)
            case ("dev-", replica, blocks):
                self._devices.removed(replica, blocks)
            case ("dev0", replica):
                self._devices.forget(replica)
