"""Chunks that replicas compute alone, to have them stored; and those with which a replica has ended.

A fill that ends an engine is no client's request: no client hears of it, and its replica forgets it with all else. So a
replica says before it begins one, and when it has ended it, however. A fill that is open when the replica is forgotten
is taken to have ended it, and is not begun again for a while; where the replica's last words blame others, it is not.
One replica at a time fills a chunk. At most `MOST` chunks are remembered as deadly, the oldest forgotten first.

A fill has a number, and a deadline. Its end may never be told: the word was lost, or its replica was cut off before it
heard that it may begin. After the deadline another replica may fill the chunk, and it is no reason for any end.
O(fills of the replica) per call. One thread; ``now`` never goes backwards.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from kvmanager.moves.leases import Numbers
from kvmanager.segments.keys import BlockHash

MOST = 1024
FILL_S = 300.0
"""Longer than an engine computes a chunk, as long as a context, on two slow cores."""


@dataclass(frozen=True, slots=True)
class _BegunFill:
    number: int
    replica: str
    deadline: float


class ChunkFills:
    """See the module's docstring. A chunk is known by the name of its last full block."""

    def __init__(self, refused_s: float, epoch: int = 0, fill_s: float = FILL_S) -> None:
        """``refused_s``: how long a deadly chunk is not computed alone; ``epoch``: the manager's."""
        self._refused_s = refused_s
        self._fill_s = fill_s
        self._numbers = Numbers(epoch)
        self._open: dict[BlockHash, _BegunFill] = {}
        """By chunk."""
        self._deadly_until: OrderedDict[BlockHash, float] = OrderedDict()

    def begin(self, now: float, replica: str, chunk: BlockHash) -> int:
        """Return the fill's number; 0: the replica may not fill the chunk now. `end` must follow, or the deadline."""
        until = self._deadly_until.get(chunk)
        if until is not None and until <= now:
            del self._deadly_until[chunk]
        elif until is not None:
            return 0
        other = self._open.get(chunk)
        if other is not None and other.replica != replica and other.deadline > now:
            return 0
        fill = self._open[chunk] = _BegunFill(self._numbers.next(), replica, now + self._fill_s)
        return fill.number

    def end(self, replica: str, chunk: BlockHash, number: int = 0) -> None:
        """Note that the replica fills the chunk no more, and lives. One that it did not fill is no error.

        ``number``: which fill; 0: the replica has not heard it, and ends whichever it may have begun.
        """
        fill = self._open.get(chunk)
        if fill is not None and fill.replica == replica and number in (0, fill.number):
            del self._open[chunk]

    def forget_replica(self, now: float, replica: str, blamed: Collection[BlockHash] | None = None) -> list[BlockHash]:
        """Note that a replica is gone; return the chunks that it may have ended with, which are refused from now on.

        ``blamed``: what its last words name; None: it left none.
        """
        left = [chunk for chunk, fill in self._open.items() if fill.replica == replica]
        in_time = [chunk for chunk in left if self._open[chunk].deadline > now]
        deadly = [chunk for chunk in in_time if blamed is None or chunk in blamed]
        for chunk in left:
            del self._open[chunk]
        for chunk in deadly:
            self._deadly_until.pop(chunk, None)
            self._deadly_until[chunk] = now + self._refused_s
            while len(self._deadly_until) > MOST:
                self._deadly_until.popitem(last=False)
        return deadly
