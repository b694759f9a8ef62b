"""The seam for eviction policies: which of the copies that may go goes first.

Division of labour: the catalogue knows *what may go* (a leaf of its location, not leased) and tells the policy by
`expose` and `shield`; the policy only decides *what goes first*, and whether a newcomer is worth a victim at all. So no
policy can break the rule "children before parents", and each one can be tried by name. One instance per location; the
manager's thread only. Nothing here may cost more than O(log n): offers and plans wait for it.
"""

from abc import ABC, abstractmethod

from kvmanager.nodes import Copy, Node


class EvictionPolicy(ABC):
    """Orders the evictable copies of one location."""

    @abstractmethod
    def expose(self, copy: Copy) -> None:
        """``copy`` may be evicted from now on. It was not exposed before."""

    @abstractmethod
    def shield(self, copy: Copy) -> None:
        """``copy``, exposed before, may no longer be evicted: it has a child now, is leased, or is leaving."""

    @abstractmethod
    def used(self, copy: Copy) -> None:
        """A request used the node of ``copy``, exposed or not; the node's score counts the use already."""

    @abstractmethod
    def victim(self) -> Copy | None:
        """Return the exposed copy to evict first and leave it exposed; None when nothing is exposed."""

    @abstractmethod
    def admits(self, newcomer: Node, victim: Copy) -> bool:
        """Return whether ``newcomer`` deserves the room of ``victim`` more than the victim does."""
