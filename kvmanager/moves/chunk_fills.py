"""Chunks that replicas compute alone, to have them stored; and those with which a replica has ended.

A fill that ends an engine is nobody's request: no client hears of it, and its replica forgets it with all else. So a
replica says before it begins one, and when it has ended it, however. What is open when the replica is forgotten has
ended it, as far as anybody knows, and is not begun again for a while; where the replica's last words blame others, it
is not. One replica at a time fills a chunk. At most `MOST` chunks are remembered as deadly, the oldest forgotten first.
O(fills of the replica) per call. One thread; ``now`` never goes backwards.
"""

from collections import OrderedDict
from collections.abc import Collection

from kvmanager.segments.keys import BlockHash

MOST = 1024


class ChunkFills:
    """See the module's docstring. A chunk is known by the name of its last full block."""

    def __init__(self, refused_s: float) -> None:
        """``refused_s``: how long a deadly chunk is not computed alone."""
        self._refused_s = refused_s
        self._open: dict[BlockHash, str] = {}
        """By chunk, the replica that fills it."""
        self._deadly_until: OrderedDict[BlockHash, float] = OrderedDict()

    def begin(self, now: float, replica: str, chunk: BlockHash) -> bool:
        """Return whether the replica may fill the chunk now; `end` must follow then."""
        until = self._deadly_until.get(chunk)
        if until is not None and until <= now:
            del self._deadly_until[chunk]
        elif until is not None:
            return False
        return self._open.setdefault(chunk, replica) == replica

    def end(self, replica: str, chunk: BlockHash) -> None:
        """Note that the replica fills the chunk no more, and lives. One that it did not fill is no error."""
        if self._open.get(chunk) == replica:
            del self._open[chunk]

    def forget_replica(self, now: float, replica: str, blamed: Collection[BlockHash] | None = None) -> list[BlockHash]:
        """Note that a replica is gone; return the chunks that it may have ended with, which are refused from now on.

        ``blamed``: what its last words name; None: it left none.
        """
        left = [chunk for chunk, filler in self._open.items() if filler == replica]
        deadly = [chunk for chunk in left if blamed is None or chunk in blamed]
        for chunk in left:
            del self._open[chunk]
        for chunk in deadly:
            self._deadly_until.pop(chunk, None)
            self._deadly_until[chunk] = now + self._refused_s
            while len(self._deadly_until) > MOST:
                self._deadly_until.popitem(last=False)
        return deadly
