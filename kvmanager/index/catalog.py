"""The catalogue: which copy of which segment is where, and every way in which that may change.

Invariants, per location, after every public method (`tests/kvmanager` checks them after random operations):

- **Closed chains.** The parent of a RESIDENT copy is RESIDENT; that of a HELD or RESERVED one is any of the three; but
  for what hangs on a copy that is being uprooted in slices (`kvmanager.index.sweeps`). Each location stands by itself,
  so that losing one location orphans nothing at another, and Redis can outlive all others.
- **Leaf-first.** A copy is exposed to the eviction policy of its partition exactly while it is RESIDENT, without
  children and leases, and its node without pins.
- **Budgets.** The bytes of all copies, promised ones included, never exceed the budget of the location, nor those of a
  partition its own, except in a partition that was cut down (`kvmanager.eviction.quotas`) until its excess is evicted.
- **Told.** A copy may be in plans exactly between its "seg+" event and its "seg-", or the "seg0" of its location.

Costs: each method is O(log n) per copy that it changes, unless its docstring says otherwise. One thread.
"""

from collections.abc import Iterable, Iterator, Mapping

from kvmanager.index.deltas import DeltaLog
from kvmanager.index.demotion_queue import DemotionQueue
from kvmanager.index.eviction_policy import Learner
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.locations import Location, Tier
from kvmanager.index.nodes import Copy, CopyState, Node
from kvmanager.index.stores import MakePolicy, Store
from kvmanager.index.sweeps import Retirement, Sweeps
from kvmanager.index.trie import PrefixTrie
from kvmanager.segments.keys import SegmentKey
from kvmanager.segments.spans import MARK_BYTES, SegmentSpan


class Catalog:
    """The trie, the stores, and the transitions between the states of `kvmanager.index.nodes`."""

    def __init__(
        self,
        trie: PrefixTrie,
        clock: HotnessClock,
        log: DeltaLog,
        make_policy: MakePolicy,
        demotion_queue: DemotionQueue,
        reuse: Learner | None,
    ) -> None:
        """``reuse``: what learns from every use; None where no policy orders by it."""
        self.trie = trie
        self.stores: dict[Location, Store] = {}
        self.clock = clock
        self.reuse = reuse
        self._log = log
        self._make_policy = make_policy
        self._demotion_queue = demotion_queue
        self.sweeps = Sweeps(self)
        self.quotas: dict[Tier, Mapping[str, int]] = {}
        """What `kvmanager.eviction.quotas` has set, for locations that come later."""

    def store(self, location: Location) -> Store:
        """Return the store of a shared location. Raises ValueError for a device.

        Of a location that is not known, or not any more, it has no budget and is not kept: see `open`.
        """
        store = self.stores.get(location)
        if store is None:
            if location.tier is Tier.DEVICE:
                raise ValueError(f"{location} is a device pool, which its replica manages: no segment is stored there")
            store = Store(location, self._make_policy)
            store.set_quotas(self.quotas.get(location.tier, {}))
        return store

    def open(self, location: Location) -> Store:
        """Return the store of a shared location, which is known from now on, until `lose`. Raises as `store`.

        Reports tell that Redis is away, which is one; of nodes that are gone there is no end.
        """
        store = self.stores[location] = self.store(location)
        return store

    def know(self, span: SegmentSpan, nbytes: int) -> Node | None:
        """Return the node of a segment, made with one use if it is new; None when it has no place in the trie.

        ``nbytes``: its size in a CPU tier, where it is raw.
        The node may start elsewhere than ``span``, or follow on another segment, if it is stored, or pinned, so; the
        caller compares.
        """
        node = self.trie.nodes.get(span.key)
        if node is None:
            node = self.trie.insert(span, self.clock.now)
            if node is not None and self.reuse is not None:
                self.reuse.made(node)
        elif node.start_block != span.start_block or (node.parent is not None and node.parent.key != span.parent):
            if node.copies is not None or node.pins:
                return node
            if not self.trie.reshape(node, span):
                return None
        if node is not None and not node.pins:
            node.nbytes = nbytes
        return node

    def use(self, node: Node) -> float:
        """Count one use of a node; return its hotness."""
        node.score = self.clock.used(node.score)
        if node.previous_sibling is not None:
            self.trie.bring_forward(node)
        if self.reuse is not None:
            self.reuse.used(node)
        copy = node.copies
        if copy is None:
            self.trie.ghost_used(node)
        while copy is not None:
            copy.partition.policy.used(copy)
            copy = copy.next
        self._demotion_queue.consider(node)
        return node.score

    def upheld(self, node: Node, store: Store) -> bool:
        """Return whether a copy of ``node`` at ``store`` would have its parent there, or a promise of it."""
        if node.parent is None:
            return True
        parent = node.parent.copy_at(store)
        return parent is not None and parent.upholds

    def reserve(
        self, store: Store, node: Node, nbytes: int, *, for_hotter: bool = False
    ) -> tuple[Copy, list[Copy]] | None:
        """Promise ``nbytes`` to a node that is upheld and has no copy here; None if too little may be evicted for it.

        Returns the copy and the copies evicted for it, children first. A refusal changes nothing. ``for_hotter``: only
        what has a lower score is evicted for it, whatever the policy thinks. O(log n) per victim.
        """
        copy = Copy(node, store, nbytes)
        if nbytes > copy.partition.budget_bytes:
            return None
        self._cover_parent(copy)
        victims = self._make_room(copy, for_hotter)
        if victims is None:
            self.uncover_parent(copy)
            return None
        if node.copies is None:
            self.trie.no_longer_ghost(node)
        copy.next, node.copies = node.copies, copy
        store.add(copy)
        return copy, victims

    def commit(self, copy: Copy, nbytes: int) -> None:
        """Note that the tier owns the complete bytes of a RESERVED copy, and publish it if its chain is there.

        ``nbytes`` is what the tier really stored; the caller has checked that the budget allows it. O(children) when
        children were committed before it.
        """
        copy.store.commit(copy, nbytes)
        parent = self._parent_of(copy)
        if parent is None or parent.state is CopyState.RESIDENT:
            self._publish(copy)

    def lease(self, copy: Copy) -> None:
        """Keep a RESIDENT copy from being evicted until the matching `unlease`."""
        if copy.evictable:
            copy.partition.policy.shield(copy)
        copy.leases += 1

    def unlease(self, copy: Copy) -> bool:
        """End one lease; return whether the copy was waiting for it and is to be evicted now."""
        copy.leases -= 1
        if copy.evictable:
            copy.partition.policy.expose(copy)
        if copy.state is CopyState.DOOMED and copy.leases == 0 and copy not in self.sweeps.leaving:
            self.forget(copy)
            return not copy.store.lost
        return False

    def may_have_come(self, copy: Copy) -> bool:
        """Note that a tier may have the bytes of a copy that is on its way out; return whether it will be freed."""
        if copy in self.sweeps.leaving:
            self.sweeps.leaving[copy] = False
            return True
        return False

    def pin(self, node: Node) -> None:
        """Keep a node and all its copies, present and to come, from being evicted until the matching `unpin`."""
        if not node.pins:
            for copy in node.all_copies():
                if copy.evictable:
                    copy.partition.policy.shield(copy)
        self.trie.pin(node)

    def unpin(self, node: Node) -> None:
        """End one pin."""
        self.trie.unpin(node)
        if not node.pins:
            for copy in node.all_copies():
                if copy.evictable:
                    copy.partition.policy.expose(copy)

    def uproot(self, copy: Copy, *, bytes_lost: bool, evicted: bool = False) -> list[Copy]:
        """Take a copy and all that counts on it out of its location; return what the tier must free, children first.

        ``bytes_lost``: the tier has lost the bytes of ``copy`` itself, or never got them. ``evicted``: it goes to make
        room. Leased copies leave the index at once, and the tier when the lease ends. More than a slice's work is left
        to `kvmanager.index.sweeps`, as is the uprooting of a copy while another one is under way. O(slice).
        """
        return self.sweeps.uproot(copy, bytes_lost=bytes_lost, evicted=evicted)

    def uproot_all(self, copies: Iterable[Copy], *, bytes_lost: bool) -> list[Copy]:
        """The same of several, looked up one by one. O(slice + copies), however much hangs on each."""
        return self.sweeps.uproot_all(copies, bytes_lost=bytes_lost)

    def drop(self, store: Store, keys: Iterable[SegmentKey]) -> tuple[int, list[Copy]]:
        """Forget segments whose bytes a location has lost; return how many it had, and what it must free after them."""
        nodes = [node for key in keys if (node := self.trie.nodes.get(key)) is not None]
        nodes.sort(key=lambda node: node.start_block, reverse=True)  # no order to evict what is lost too
        dropped = 0

        def there() -> Iterator[Copy]:
            nonlocal dropped
            for node in nodes:
                copy = node.copy_at(store)
                if copy is not None:
                    dropped += 1
                    yield copy

        freed = self.uproot_all(there(), bytes_lost=True)
        return dropped, freed

    def lose(self, store: Store) -> None:
        """Forget a location with all that it held and was promised: it is gone. O(tenants), and the rest in slices.

        It may be opened again at once. Nodes come and go: what a manager goes through depends on those that there are.
        """
        self.stores.pop(store.location, None)
        store.lost = True
        for copy in list(store.waiting):
            self.forget(copy)
        self._retire(store, None)

    def clear(self, store: Store, tenant: str | None) -> None:
        """Begin to empty a location, or what one tenant has there; leased copies follow when their lease ends."""
        self._retire(store, tenant)

    def _retire(self, store: Store, tenant: str | None) -> None:
        shares = [share for share in store.shares.values() if tenant in (None, share.tenant)]
        if tenant is None and store.resident_segments:
            tier, holder = store.location
            self._log.append(("seg0", tier.value, holder))
        for share in shares:
            store.retire(share, told=tenant is None)
        self.sweeps.begin(Retirement(self.sweeps, self, store))

    def _make_room(self, copy: Copy, for_hotter: bool) -> list[Copy] | None:
        policy = copy.partition.policy
        missing = copy.nbytes - copy.partition.free_bytes
        victims: list[Copy] = []
        while missing > 0:
            victim = policy.victim()
            if (
                victim is None
                or not policy.admits(copy.node, victim)
                or (for_hotter and victim.node.score >= copy.node.score)
            ):
                for spared in reversed(victims):
                    self._cover_parent(spared)
                    policy.expose(spared)
                return None
            self.uncover_parent(victim)  # first, so that a chain keeps its place among the coldest
            policy.shield(victim)
            victims.append(victim)
            missing -= victim.nbytes
        for victim in victims:
            self.withdraw(victim)
            self.forget(victim, evicted=True)
        return victims

    def _parent_of(self, copy: Copy) -> Copy | None:
        """Return the copy on which ``copy`` counts: none if its parent was stored again while it is on its way out."""
        parent = copy.node.parent
        found = None if parent is None else parent.copy_at(copy.store)
        return found if found is not None and found.share is copy.share else None

    def _cover_parent(self, copy: Copy) -> None:
        parent = self._parent_of(copy)
        if parent is not None:
            if parent.evictable:
                parent.partition.policy.shield(parent)
            parent.children += 1

    def uncover_parent(self, copy: Copy) -> None:
        """Note that a copy counts on its parent no more."""
        parent = self._parent_of(copy)
        if parent is not None:
            parent.children -= 1
            if parent.evictable:
                parent.partition.policy.expose(parent)

    def _publish(self, head: Copy) -> None:
        ready = [head]
        while ready:
            copy = ready.pop()
            copy.store.publish(copy)
            node = copy.node
            tier, holder = copy.store.location
            self._log.append(("seg+", tier.value, holder, node.key, node.start_block, node.marks))
            self._demotion_queue.consider(node)
            if copy.children:
                below = (child.copy_at(copy.store) for child in node.children())
                held = (child for child in below if child is not None and child.state is CopyState.HELD)
                ready.extend(child for child in held if child.share is copy.share)
            elif not node.pins:
                copy.partition.policy.expose(copy)

    def withdraw(self, copy: Copy) -> None:
        """Take a copy out of plans, and out of all that is promised."""
        copy.store.withdraw(copy)
        if copy.state is CopyState.RESIDENT and not (copy.share.told or copy.store.lost):
            tier, holder = copy.store.location
            self._log.append(("seg-", tier.value, holder, copy.node.key, copy.node.marks[:MARK_BYTES]))

    def forget(self, copy: Copy, *, evicted: bool = False) -> None:
        """Count a withdrawn copy out; ``evicted``: to make room."""
        copy.store.remove(copy, evicted=evicted)
        self._part(copy)

    def _part(self, copy: Copy) -> None:
        """Take a copy that is GONE from its node."""
        node = copy.node
        if node.copies is copy:
            node.copies = copy.next
        else:
            before = next(other for other in node.all_copies() if other.next is copy)
            before.next = copy.next
        copy.next = None
        if node.copies is None:
            self.trie.became_ghost(node)
