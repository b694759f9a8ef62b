"""A binary min-heap of scored items whose entries can be changed and removed in O(log n).

Each item remembers its position in the heap, so nothing is searched, no stale entry stays behind and nothing is ever
compacted: the worst case of every operation is O(log n), which a lazy heap offers only on average.
"""

from typing import Generic, Protocol, TypeVar


class HeapItem(Protocol):
    """What can lie in a heap. ``position`` belongs to the heap: `OUTSIDE` while the item lies in none."""

    position: int


OUTSIDE = -1

ItemT = TypeVar("ItemT", bound=HeapItem)


class ScoreHeap(Generic[ItemT]):
    """Items by score, lowest first. An item lies in at most one heap. One thread."""

    __slots__ = ("_items", "_scores")

    def __init__(self) -> None:
        self._items: list[ItemT] = []
        self._scores: list[float] = []

    def __len__(self) -> int:
        return len(self._items)

    def push(self, item: ItemT, score: float) -> None:
        """Add an item that is in no heap."""
        self._items.append(item)
        self._scores.append(score)
        self._up(len(self._items) - 1, item, score)

    def lowest(self) -> ItemT | None:
        """Return the item with the lowest score, None when there is none. O(1)."""
        return self._items[0] if self._items else None

    def discard(self, item: ItemT) -> None:
        """Take an item out; one that is in no heap stays as it is."""
        position = item.position
        if position == OUTSIDE:
            return
        item.position = OUTSIDE
        last, score = self._items.pop(), self._scores.pop()
        if last is not item:
            self._place(position, last, score)

    def update(self, item: ItemT, score: float) -> None:
        """Give an item of this heap a new score; one that is in no heap stays as it is."""
        if item.position != OUTSIDE:
            self._place(item.position, item, score)

    def _place(self, position: int, item: ItemT, score: float) -> None:
        if position and score < self._scores[(position - 1) >> 1]:
            self._up(position, item, score)
        else:
            self._down(position, item, score)

    def _up(self, position: int, item: ItemT, score: float) -> None:
        items, scores = self._items, self._scores
        while position:
            above = (position - 1) >> 1
            if scores[above] <= score:
                break
            moved = items[position] = items[above]
            scores[position] = scores[above]
            moved.position = position
            position = above
        items[position] = item
        scores[position] = score
        item.position = position

    def _down(self, position: int, item: ItemT, score: float) -> None:
        items, scores = self._items, self._scores
        size = len(items)
        while (below := 2 * position + 1) < size:
            if below + 1 < size and scores[below + 1] < scores[below]:
                below += 1
            if score <= scores[below]:
                break
            moved = items[position] = items[below]
            scores[position] = scores[below]
            moved.position = position
            position = below
        items[position] = item
        scores[position] = score
        item.position = position
