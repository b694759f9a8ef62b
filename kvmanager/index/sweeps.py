"""Long work in slices: what would hold up plans in one piece is begun at once and done a bounded part at a time.

What must hold at once holds from the first moment: a share that is cleared or lost is *retired*, and a copy whose bytes
are lost is DOOMED, so no plan contains it, nothing new counts on it, and its location stores that segment again only
when it has left. Only counting out and freeing the copies takes its time, children before parents. Meanwhile everything
else goes on: what is stored after a `clear` was asked for stays.

Three kinds of work, each `MOST_PER_SLICE` steps to a slice, a step being one copy or one node looked at:

- *Uprooting*: a copy and all that counts on it. While it is under way some copies are RESIDENT below a DOOMED one (the
  only exception to "closed chains"); plans stop at the gap. One at a time: a later one may contain an earlier one's.
- *Retirement*: all that one tenant, or all, had at a location: cleared, or lost with the location. Its copies hang
  together in the list of the retired share, children before parents, so each slice takes the first.
- *Survey*: which known segments have earned a copy at Redis, when Redis gets its first bytes.

One thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol

from kvmanager.index.locations import Tier
from kvmanager.index.nodes import Copy, CopyState, Node
from kvmanager.index.stores import Store
from kvmanager.index.trie import PrefixTrie

MOST_PER_SLICE = 500
"""Steps of one slice, 1 to 4 ms of processor time: a plan waits for one or two."""


class Placement(Protocol):
    """The steps in which a copy leaves its location (`kvmanager.index.catalog`)."""

    trie: PrefixTrie

    def uncover_parent(self, copy: Copy) -> None:
        """Note that a copy counts on its parent no more."""

    def withdraw(self, copy: Copy) -> None:
        """Take a copy out of plans, and out of all that is promised."""

    def forget(self, copy: Copy, *, evicted: bool = False) -> None:
        """Count a withdrawn copy out; ``evicted``: to make room."""


class SweepWork(Protocol):
    """Something that is done in slices."""

    def step(self, most: int) -> tuple[list[Copy], int]:
        """Do at most ``most`` steps; return the copies that a tier must free, and how many steps it took."""

    @property
    def done(self) -> bool:
        """Whether nothing is left."""


class Sweeps:
    """Takes copies out of their locations. `step` goes on with what is under way."""

    def __init__(self, catalog: Placement) -> None:
        self._catalog = catalog
        self._uprootings: deque[_Uprooting] = deque()
        self._others: deque[SweepWork] = deque()
        self.leaving: dict[Copy, bool] = {}
        """DOOMED copies that something may still count on; True: nothing has to be freed for them."""
        self.cleared: Counter[Tier] = Counter()
        """Copies of retired shares that tiers were told to free, ever."""

    def __bool__(self) -> bool:
        return bool(self._uprootings or self._others)

    def uproot(self, head: Copy, *, bytes_lost: bool, evicted: bool = False) -> list[Copy]:
        """Take a copy and all that counts on it out of its location; return what the tier must free, children first.

        What does not fit into one slice, or waits for an uprooting that is under way, follows from `step`.
        """
        return self._uproot(head, MOST_PER_SLICE, bytes_lost, evicted)[0]

    def uproot_all(self, heads: Iterable[Copy], *, bytes_lost: bool) -> list[Copy]:
        """The same of several, with one slice for what hangs on all of them. O(slice + heads).

        Each is looked up when its turn comes: one may have taken the next along.
        """
        freed: list[Copy] = []
        left = MOST_PER_SLICE
        for head in heads:
            found, steps = self._uproot(head, left, bytes_lost, False)
            freed += found
            left -= steps
        return freed

    def _uproot(self, head: Copy, most: int, bytes_lost: bool, evicted: bool) -> tuple[list[Copy], int]:
        """Return what is freed, and the steps that it took: at most ``most``, or one."""
        if head.state is CopyState.DOOMED:
            if head in self.leaving:
                self.leaving[head] |= bytes_lost
            elif bytes_lost:
                self._catalog.forget(head)
            return [], 1
        if head.share.retired:
            return self.pull(head, bytes_lost=bytes_lost, evicted=evicted), 1
        job = _Uprooting(self, self._catalog, head, bytes_lost, evicted)
        if head.children and (self._uprootings or most < 1):
            self._uprootings.append(job)
            return [], 1
        freed, steps = job.step(max(1, most))
        if not job.done:
            self._uprootings.append(job)
        return freed, steps

    def begin(self, work: SweepWork) -> None:
        """Do something else in slices."""
        self._others.append(work)

    def step(self) -> list[Copy]:
        """Do one slice; return what tiers must free, children first."""
        freed: list[Copy] = []
        left = MOST_PER_SLICE
        while left > 0 and self:
            queue: deque[_Uprooting] | deque[SweepWork] = self._uprootings or self._others
            found, steps = queue[0].step(left)
            freed += found
            left -= max(1, steps)
            if queue[0].done:
                queue.popleft()
        return freed

    def pull(self, copy: Copy, *, bytes_lost: bool, evicted: bool = False) -> list[Copy]:
        """Take one copy out whatever counts on it, for that goes too."""
        lost = bytes_lost or copy.store.lost or copy.state is CopyState.RESERVED
        if copy.evictable:
            copy.partition.policy.shield(copy)
        self._catalog.uncover_parent(copy)
        self._catalog.withdraw(copy)
        if copy.leases and not lost:
            copy.state = CopyState.DOOMED
            copy.store.wait_for_leases(copy)
            return []
        self._catalog.forget(copy, evicted=evicted)
        return [] if lost else [copy]


class _Branch:
    """A copy on its way out, and the first of its children that was not looked at yet."""

    __slots__ = ("copy", "next_child")

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.next_child: Node | None = copy.node.first_child if copy.children else None


class _Uprooting:
    """Depth first, each copy DOOMED when it is reached and forgotten when all that counts on it is.

    The cursors of its path, and no other ones, stop in the trie: that of the last copy between two slices only, when
    other work, and other uprootings, come in between.
    """

    def __init__(self, sweeps: Sweeps, catalog: Placement, head: Copy, bytes_lost: bool, evicted: bool) -> None:
        self._sweeps = sweeps
        self._catalog = catalog
        self._evicted = evicted
        self._head: Copy | None = head
        self._path: list[_Branch] = []
        self._doom(head, bytes_lost)

    @property
    def done(self) -> bool:
        return self._head is None and not self._path

    def step(self, most: int) -> tuple[list[Copy], int]:
        trie = self._catalog.trie
        if self._head is None:
            trie.go_on(self._path[-1])
        elif self._head in self._sweeps.leaving:
            self._path = [_Branch(self._head)]
        # else another uprooting has taken it along
        self._head = None
        path = self._path
        freed: list[Copy] = []
        steps = 0
        while path and steps < most:
            steps += 1
            branch = path[-1]
            child = branch.next_child
            if child is None or not branch.copy.children:
                path.pop()
                freed += self._leave(branch.copy)
                if path:
                    trie.go_on(path[-1])
                continue
            branch.next_child = child.next_sibling
            copy = child.copy_at(branch.copy.store)
            if copy is None or not (copy.upholds or copy in self._sweeps.leaving):
                continue
            if copy.upholds:
                self._doom(copy, bytes_lost=False)
            trie.stop(branch)
            path.append(_Branch(copy))
        if path:
            trie.stop(path[-1])
        return freed, steps

    def _doom(self, copy: Copy, bytes_lost: bool) -> None:
        self._sweeps.leaving[copy] = bytes_lost or copy.state is CopyState.RESERVED
        if copy.evictable:
            copy.partition.policy.shield(copy)
        self._catalog.withdraw(copy)
        copy.state = CopyState.DOOMED

    def _leave(self, copy: Copy) -> list[Copy]:
        lost = self._sweeps.leaving.pop(copy)
        if copy.state is CopyState.GONE:
            return []
        self._catalog.uncover_parent(copy)
        if copy.leases and not lost:
            if copy.share.retired:
                copy.store.wait_for_leases(copy)
            return []
        self._catalog.forget(copy, evicted=self._evicted)
        return [] if lost or copy.store.lost else [copy]


class Retirement:
    """Takes the first copy of the lists of a location's retired shares, until there is none."""

    def __init__(self, sweeps: Sweeps, catalog: Placement, store: Store) -> None:
        self._sweeps = sweeps
        self._catalog = catalog
        self._store = store

    @property
    def done(self) -> bool:
        """Whether all have left."""
        return not self._store.retiring

    def step(self, most: int) -> tuple[list[Copy], int]:
        """See `SweepWork.step`."""
        store = self._store
        freed: list[Copy] = []
        steps = 0
        while store.retiring and steps < most:
            steps += 1
            copy = store.retiring[-1].first
            if copy is None:
                store.retiring.pop()
            elif copy.state is not CopyState.DOOMED:
                freed += self._sweeps.pull(copy, bytes_lost=False)
            elif store.lost:
                self._catalog.forget(copy)
            elif copy in self._sweeps.leaving:
                copy.share.unlink(copy)  # an uprooting has it
            else:
                store.wait_for_leases(copy)
        self._sweeps.cleared[store.location.tier] += len(freed)
        return freed, steps
