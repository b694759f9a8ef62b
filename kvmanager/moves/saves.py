"""Saves: offer, then commit or abandon.

A replica *offers* segments that it has computed; the manager answers which to store, and promises their bytes under a
save id. The tier fetches them and *commits* each one when it owns the complete bytes; only then can a plan contain it.
What is not committed is *abandoned*, by name or by time. Two replicas never store one segment twice at one location.
A *prefetch* is a save whose bytes come from Redis.
``now`` never goes backwards, so saves expire in the order in which they were made. One thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvmanager.index.catalog import Catalog
from kvmanager.index.counters import Counters
from kvmanager.index.locations import REDIS
from kvmanager.index.nodes import Copy, CopyState, Node
from kvmanager.index.stores import Store
from kvmanager.moves.directives import Evict
from kvmanager.moves.due_evictions import evictions
from kvmanager.moves.leases import Numbers
from kvmanager.segments.forms import DENSE
from kvmanager.segments.keys import SegmentKey
from kvmanager.segments.spans import SegmentSpan

MOST_ABOVE = 4
"""Segments that one prefetch brings along, because what it was asked for follows on them: one for each place where
the sequence leaves another one that was stored first."""

_Size = TypeVar("_Size")


@dataclass(frozen=True, slots=True)
class Offer:
    """The answer to an offer: first carry out ``evict``, then store ``keys``, parents first."""

    save_id: int
    """0 when nothing is to be stored."""
    keys: tuple[SegmentKey, ...]
    evict: tuple[Evict, ...]
    above: tuple[tuple[SegmentKey, int], ...] = ()
    """Of a prefetch: those of ``keys`` that the caller did not name but the named ones follow on, with raw sizes."""


@dataclass(slots=True)
class _Save:
    replica: str
    deadline: float
    prefetches: bool
    pending: dict[SegmentKey, Copy]
    """What is neither committed nor abandoned yet."""


class Saves:
    """Hands out reservations and turns them into stored segments."""

    def __init__(
        self, catalog: Catalog, counters: Counters, blocks_per_segment: int, save_s: float, numbers: Numbers
    ) -> None:
        self._catalog = catalog
        self._counters = counters
        self._blocks_per_segment = blocks_per_segment
        self._save_s = save_s
        self._saves: dict[int, _Save] = {}
        self._save_of: dict[Copy, int] = {}
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._saves)

    def offer(
        self, now: float, replica: str, store: Store, spans: Sequence[SegmentSpan], nbytes: Sequence[int]
    ) -> Offer:
        """Decide which of ``spans`` are stored at ``store``; ``nbytes`` are their sizes, header included.

        Every segment whose parent is known is remembered with one use, stored or not, so that the next offer of a
        refused one is stronger. O(log n) per segment and victim. Raises ValueError for a span that crosses a cut.
        """
        counters = self._counters
        counters.offered_segments += len(spans)
        pending: dict[SegmentKey, Copy] = {}
        evicted: list[Copy] = []
        for span in spans:
            if self._crosses_cut(span):
                cut = self._blocks_per_segment
                raise ValueError(f"{span} crosses a multiple of {cut} blocks: use split_segments(..., {cut}, ...)")
        for span, size in self._in_order(spans, nbytes):
            node = self._catalog.know(span, size)
            if node is None:
                counters.refused_unknown_parent += 1
            elif node.copy_at(store) is not None:
                continue
            elif node.start_block != span.start_block:
                counters.refused_other_cut += 1
            elif not self._catalog.upheld(node, store):
                counters.refused_unknown_parent += 1
            elif (reserved := self._catalog.reserve(store, node, size)) is None:
                counters.refused_colder += 1
            else:
                copy, victims = reserved
                pending[node.key] = copy
                evicted += victims
        self._counters.evicted_segments += len(evicted)
        return Offer(self._open(replica, now, pending), tuple(pending), evictions(evicted))

    def prefetch(self, now: float, replica: str, store: Store, keys: Sequence[SegmentKey]) -> Offer:
        """Decide which of ``keys`` to copy from Redis to ``store``: of those that Redis has and ``store`` has not.

        Reserved is what they take raw, which may be more than at Redis.
        As for an offer, the parent must be there and only colder leaves make room; `MOST_ABOVE` parents that only Redis
        has are copied too. O(log n) per segment and victim.
        """
        redis = self._catalog.stores.get(REDIS)
        nodes = self._catalog.trie.nodes
        pending: dict[SegmentKey, Copy] = {}
        evicted: list[Copy] = []
        # Chosen before any room is made: what is evicted for these is not fetched again by the same order.
        wanted = [
            node
            for key in dict.fromkeys(keys)
            if redis is not None
            and (node := nodes.get(key)) is not None
            and (stored := node.copy_at(redis)) is not None
            and stored.resident
            and stored.form == DENSE
            and node.copy_at(store) is None
        ]
        above = self._above(wanted, store, redis) if redis is not None else {}
        for node in sorted((*above, *wanted), key=lambda node: node.start_block):
            if (
                not self._catalog.upheld(node, store)
                or (reserved := self._catalog.reserve(store, node, node.nbytes)) is None
            ):
                self._counters.refused_promotions += 1
            else:
                copy, victims = reserved
                pending[node.key] = copy
                evicted += victims
        self._counters.evicted_segments += len(evicted)
        save_id = self._open(replica, now, pending, prefetches=True)
        unnamed = tuple((key, copy.nbytes) for key, copy in pending.items() if copy.node in above)
        return Offer(save_id, tuple(pending), evictions(evicted), unnamed)

    def commit(self, now: float, store: Store, keys: Sequence[SegmentKey], nbytes: Sequence[int]) -> list[SegmentKey]:
        """Note that the tier owns the complete bytes of ``keys``; return those it should keep, parents first.

        Segments are refused without a reservation that still holds, and where they are larger than reserved.
        Committing twice is no error.
        """
        accepted: list[SegmentKey] = []
        for node, size in self._known(keys, nbytes):
            copy = node.copy_at(store)
            if copy is None or not copy.upholds or not self._commit(now, copy, size):
                continue
            accepted.append(node.key)
        self._counters.refused_commits += len(keys) - len(accepted)
        return accepted

    def adopt(
        self,
        now: float,
        store: Store,
        spans: Sequence[SegmentSpan],
        nbytes: Sequence[int],
        raw_nbytes: Sequence[int],
    ) -> list[SegmentKey]:
        """Take into the index what a tier reports to own already; return the keys it should keep, parents first.

        ``nbytes`` are the sizes there, ``raw_nbytes`` those that the segments have in a CPU tier.
        Refused is what has no chain to its head, exceeds the budget (nothing is evicted for it), is stored elsewhere in
        another cut, or crosses a cut: a tier that outlives a server may have been filled with longer segments.
        """
        accepted: list[SegmentKey] = []
        sized = zip(spans, nbytes, raw_nbytes, strict=True)
        whole = [(span, (size, raw_size)) for span, size, raw_size in sized if not self._crosses_cut(span)]
        for span, (size, raw_size) in self._in_order([span for span, _ in whole], [sizes for _, sizes in whole]):
            node = self._catalog.know(span, raw_size)
            copy = None if node is None else node.copy_at(store)
            if (
                node is not None
                and copy is None
                and node.start_block == span.start_block
                and self._catalog.upheld(node, store)
                and size <= store.partition_of(node.tenant).free_bytes
                and (reserved := self._catalog.reserve(store, node, size)) is not None
            ):
                copy = reserved[0]
            if copy is not None and copy.upholds and self._commit(now, copy, size):
                accepted.append(span.key)
        self._counters.refused_commits += len(spans) - len(accepted)
        return accepted

    def abandon(self, save_id: int) -> list[Copy]:
        """Give back what of a save is not committed; return stored copies that lost their chain by it."""
        save = self._saves.pop(save_id, None)
        if save is None:
            return []
        for copy in save.pending.values():
            del self._save_of[copy]
        reserved = (copy for copy in save.pending.values() if copy.state is CopyState.RESERVED)
        return self._catalog.uproot_all(reserved, bytes_lost=True)

    def expire(self, now: float) -> list[Copy]:
        """Abandon the saves whose time is over; return stored copies that lost their chain by it. O(expired)."""
        freed: list[Copy] = []
        while self._saves:
            save_id, save = next(iter(self._saves.items()))
            if save.deadline > now:
                break
            self._counters.expired_reservations += 1
            freed += self.abandon(save_id)
        return freed

    def forget_replica(self, replica: str) -> list[Copy]:
        """Abandon the saves of a replica that is gone; return stored copies that lost their chain by it. O(saves)."""
        orphaned = [save_id for save_id, save in self._saves.items() if save.replica == replica]
        return [copy for save_id in orphaned for copy in self.abandon(save_id)]

    def oldest_s(self, now: float) -> float:
        """Return the age in seconds of the oldest unfinished save, 0 without any."""
        oldest = next(iter(self._saves.values()), None)
        return 0.0 if oldest is None else now - (oldest.deadline - self._save_s)

    def _above(self, wanted: Sequence[Node], store: Store, redis: Store) -> dict[Node, None]:
        """Return what ``wanted`` follow on that ``store`` lacks and Redis has: of each of them all, or nothing."""
        named = set(wanted)
        found: dict[Node, None] = {}
        for node in wanted:
            lacking: list[Node] = []
            parent = node.parent
            while parent is not None and parent not in named and parent not in found:
                here, at_redis = parent.copy_at(store), parent.copy_at(redis)
                if here is not None and here.upholds:
                    break
                full = len(found) + len(lacking) == MOST_ABOVE
                if full or here is not None or at_redis is None or not at_redis.resident or at_redis.form:
                    lacking.clear()
                    break
                lacking.append(parent)
                parent = parent.parent
            found |= dict.fromkeys(lacking)
        return found

    def _open(self, replica: str, now: float, pending: dict[SegmentKey, Copy], *, prefetches: bool = False) -> int:
        if not pending:
            return 0
        save_id = self._numbers.next()
        self._saves[save_id] = _Save(replica, now + self._save_s, prefetches, pending)
        self._save_of.update(dict.fromkeys(pending.values(), save_id))
        return save_id

    def _commit(self, now: float, copy: Copy, nbytes: int) -> bool:
        if copy.state is not CopyState.RESERVED:
            return True
        save_id = self._save_of.get(copy)
        if nbytes > copy.nbytes or (save_id is not None and self._saves[save_id].deadline <= now):
            return False
        self._catalog.commit(copy, nbytes)
        self._counters.committed_segments += 1
        if save_id is not None:
            del self._save_of[copy]
            save = self._saves[save_id]
            self._counters.promoted_segments += save.prefetches
            del save.pending[copy.node.key]
            if not save.pending:
                del self._saves[save_id]
        return True

    def _crosses_cut(self, span: SegmentSpan) -> bool:
        return span.start_block // self._blocks_per_segment != (span.end_block - 1) // self._blocks_per_segment

    def _in_order(self, spans: Sequence[SegmentSpan], sizes: Sequence[_Size]) -> list[tuple[SegmentSpan, _Size]]:
        if spans and self._catalog.reuse is not None:
            self._catalog.reuse.offered(max(span.end_block for span in spans))
        return sorted(zip(spans, sizes, strict=True), key=lambda sized: sized[0].start_block)

    def _known(self, keys: Sequence[SegmentKey], nbytes: Sequence[int]) -> list[tuple[Node, int]]:
        nodes = self._catalog.trie.nodes
        known = [(nodes[key], size) for key, size in zip(keys, nbytes, strict=True) if key in nodes]
        return sorted(known, key=lambda sized: sized[0].start_block)
