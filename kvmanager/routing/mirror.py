"""A router's copy of the placement, kept up to date by deltas, so that routing a request needs no call.

A mirror may be late, never inconsistent: it applies events strictly in order. When some are missing, or the manager is
a new one, it refuses them and asks for a snapshot, serving its last view until that comes. Being late costs a worse
choice of replica and nothing else, for plans are made by the manager. How far all devices hold a prompt is found in one
walk along it (`DeviceHolders`). One thread.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvmanager.index.deltas import NOTHING_SEEN, Deltas, Event, Position
from kvmanager.index.locations import Tier
from kvmanager.index.run_index import Run, RunIndex
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import MARK_BYTES, join_marks


class TierHits(NamedTuple):
    """Leading blocks of a prompt, each counted at the fastest tier that a replica can take it from."""

    device: int
    cpu: int
    redis: int


class DeviceHolders:
    """Which replicas' devices hold each block: for each a number whose bits are the replicas.

    A router asks for all replicas at once, for every prompt. A walk for each of 64 replicas along the 8,192 blocks of a
    long prompt takes 60 ms; one for all takes less than one of those.
    """

    def __init__(self) -> None:
        self._masks: dict[BlockHash, int] = {}
        self._blocks: dict[str, set[BlockHash]] = {}
        self._bits: dict[str, int] = {}

    def stored(self, replica: str, hashes: Iterable[BlockHash]) -> None:
        """Add blocks; those that are known stay. O(blocks)."""
        bit = self._bits.get(replica)
        if bit is None:
            taken = set(self._bits.values())
            bit = self._bits[replica] = next(1 << n for n in range(len(taken) + 1) if 1 << n not in taken)
        held, masks = self._blocks.setdefault(replica, set()), self._masks
        for block in hashes:
            held.add(block)
            masks[block] = masks.get(block, 0) | bit

    def removed(self, replica: str, hashes: Iterable[BlockHash]) -> None:
        """Take blocks away. O(blocks)."""
        held = self._blocks.get(replica)
        if held is None:
            return
        for block in hashes:
            if block in held:
                held.discard(block)
                self._clear(block, self._bits[replica])

    def forget(self, replica: str) -> None:
        """Forget a replica. O(blocks that it holds)."""
        for block in self._blocks.pop(replica, ()):
            self._clear(block, self._bits[replica])
        self._bits.pop(replica, None)

    def leading_blocks(self, hashes: Sequence[BlockHash], replicas: Iterable[str]) -> dict[str, int]:
        """Return how many leading blocks of ``hashes`` each replica holds: up to its first hole.

        O(the largest of them), and O(replicas) whenever some replica holds no more.
        """
        found = dict.fromkeys(replicas, 0)
        going_on = {replica: self._bits[replica] for replica in found if replica in self._bits}
        mask, masks = sum(going_on.values()), self._masks
        for position, block in enumerate(hashes):
            left = mask & masks.get(block, 0)
            if left == mask:
                continue
            for replica in [replica for replica, bit in going_on.items() if not bit & left]:
                found[replica] = position
                del going_on[replica]
            mask = left
            if not mask:
                break
        return {**found, **dict.fromkeys(going_on, len(hashes))}

    def _clear(self, block: BlockHash, bit: int) -> None:
        left = self._masks[block] & ~bit
        if left:
            self._masks[block] = left
        else:
            del self._masks[block]


class _Placement:
    """What is where. Each location stands by itself: it has all that its segments follow on."""

    def __init__(self) -> None:
        self.devices = DeviceHolders()
        self.shared: dict[tuple[str, str], RunIndex[Run]] = {}

    def apply(self, event: Event) -> None:
        match event:
            case ("seg+", tier, holder, _, _, marks):
                held = self.shared.get((tier, holder))
                if held is None:
                    held = self.shared[tier, holder] = RunIndex()
                if all(twin.marks != marks for twin in held.twins(marks[:MARK_BYTES])):  # it may be told twice
                    held.add(Run(marks))
            case ("seg-", tier, holder, key, first):
                if (held := self.shared.get((tier, holder))) is not None:
                    for twin in [twin for twin in held.twins(first) if twin.marks[-MARK_BYTES:] == key[:MARK_BYTES]]:
                        held.remove(twin)
            case ("seg0", tier, holder):
                self.shared.pop((tier, holder), None)
            case ("dev+", replica, blocks):
                self.devices.stored(replica, blocks)
            case ("dev-", replica, blocks):
                self.devices.removed(replica, blocks)
            case ("dev0", replica):
                self.devices.forget(replica)


class PlacementMirror:
    """What is where, as of `position`. Poll with ``apply(manager.deltas_since(mirror.position, limit))``."""

    def __init__(self, blocks_per_segment: int) -> None:
        self.position = NOTHING_SEEN
        self._blocks_per_segment = blocks_per_segment
        self._epoch: int | None = None
        self._view = _Placement()
        self._coming: _Placement | None = None
        """What takes the place of the view once all parts of a snapshot are there."""

    def apply(self, deltas: Deltas) -> bool:
        """Apply events; False if they do not follow what is known. `position` then asks for a snapshot. O(events)."""
        part = deltas.part
        if deltas.waits:
            self.position, self._coming = NOTHING_SEEN, None
            return True
        if part is not None and part.number == 0:
            self._coming = _Placement()
            self._epoch = deltas.epoch
        elif (
            deltas.epoch != self._epoch
            or deltas.first != self.position.seq + 1
            or (part is not None and (part.snapshot_id, part.number) != self.position[1:])
        ):
            self.position, self._coming = NOTHING_SEEN, None
            return False
        else:
            for event in deltas.events:
                (self._coming or self._view).apply(event)
        if part is None:
            self.position = self.position._replace(seq=deltas.last)
            return True
        assert self._coming is not None  # the part continues what the first one began
        for event in part.events:
            self._coming.apply(event)
        if part.last:
            self._view, self._coming = self._coming, None
            self.position = Position(deltas.last)
        else:
            self.position = Position(deltas.last, part.snapshot_id, part.number + 1)
        return True

    @property
    def segments(self) -> int:
        """How many segments of shared tiers it holds; while a snapshot comes, those of the old view and of the new."""
        views = (self._view, self._coming) if self._coming is not None else (self._view,)
        return sum(len(held) for view in views for held in view.shared.values())

    def coverage(self, hashes: Sequence[BlockHash], replica: str) -> TierHits:
        """Return what one replica would find of a prompt; see `coverages`."""
        return self.coverages(hashes, [replica])[replica]

    def coverages(
        self, hashes: Sequence[BlockHash], replicas: Iterable[str], exact_hashes: Sequence[BlockHash] = ()
    ) -> dict[str, TierHits]:
        """Return what each replica would find of a prompt: on its device, then what CPU tiers and then Redis add.

        ``exact_hashes``: of the same tokens, where a tolerant prompt may read them too: in shared tiers, for an
        engine's own cache knows no other name for a block. O(blocks), for a device may have holes, and O(segments)
        for each shared location that has the first one.
        """
        prompts = [join_marks(named) for named in (hashes, exact_hashes) if named]
        in_cpu, in_redis = (
            max((self._reach(marks, tier) for marks in prompts), default=0) for tier in (Tier.CPU, Tier.REDIS)
        )
        found: dict[str, TierHits] = {}
        for replica, device in self._view.devices.leading_blocks(hashes, replicas).items():
            cpu = max(device, in_cpu)
            found[replica] = TierHits(device, cpu - device, max(cpu, in_redis) - cpu)
        return found

    def _reach(self, marks: bytes, tier: Tier) -> int:
        ends = (
            held.path(marks, self._blocks_per_segment, _counts)[1]
            for (held_tier, _), held in self._view.shared.items()
            if held_tier == tier.value
        )
        return max((reached[-1] for reached in ends if reached), default=0)


def _counts(run: Run) -> Run:
    """All that is told counts."""
    return run
