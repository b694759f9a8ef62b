"""The seam for eviction policies: which of the copies that may go goes first.

Division of labour: the catalogue knows *what may go* (a leaf of its location, neither leased nor pinned) and tells the
policy by `expose` and `shield`; the policy only decides *what goes first*, and whether a newcomer is worth a victim at
all. So no policy can break the rule "children before parents", and each one can be tried by name.

One instance per partition of a location (`kvmanager.index.stores`); the manager's thread only. Nothing here may cost
more than O(log n): offers and plans wait for it. Life of a copy, as its policy sees it: `stored`, then any number of
`expose` and `shield` in turn, then `left`, which finds it shielded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

from kvmanager.index.hotness import HotnessClock
from kvmanager.index.nodes import Copy, Node


class Learner(Protocol):
    """What is told of every use, where a policy in use `learns`: `kvmanager.eviction.reuse_model.ReuseModel`."""

    def request(self, prompt_blocks: int) -> None:
        """Count one request; the uses that follow are its."""

    def used(self, node: Node) -> None:
        """Note that the request used a node; the deepest comes first. O(1)."""

    def offered(self, end_block: int) -> None:
        """Note that the nodes made next belong to a sequence that ends at ``end_block``."""

    def made(self, node: Node) -> None:
        """Note a node that was not known before; parents come first."""

    def forgot(self, node: Node) -> None:
        """Note that a node leaves the trie: whether it is used again cannot be seen any more."""


class PolicySetting(NamedTuple):
    """What a policy may know of the place it works for."""

    clock: HotnessClock
    """The manager's, one for all policies; for reading only."""
    budget_bytes: Callable[[], int]
    """The partition's budget; it may change."""
    seed: int
    """For what a policy draws by chance."""
    reuse: Learner | None = None
    """What requests teach about reuse, one for all policies; None where none of them `learns`."""


class EvictionPolicy(ABC):
    """Orders the evictable copies of one partition of a location."""

    learns: ClassVar[bool] = False
    """Whether it orders by `PolicySetting.reuse`. Where no policy does there is no model, and it costs nothing."""

    def __init__(self, setting: PolicySetting) -> None:
        self.setting = setting

    @abstractmethod
    def expose(self, copy: Copy) -> None:
        """``copy`` may be evicted from now on. It was not exposed before."""

    @abstractmethod
    def shield(self, copy: Copy) -> None:
        """``copy``, exposed before, may no longer be evicted: it has a child now, is leased or pinned, or leaves."""

    @abstractmethod
    def used(self, copy: Copy) -> None:
        """A request used the node of ``copy``, exposed or not; the node's score counts the use already."""

    @abstractmethod
    def victim(self) -> Copy | None:
        """Return the exposed copy to evict first and leave it exposed; None when nothing is exposed."""

    @abstractmethod
    def admits(self, newcomer: Node, victim: Copy) -> bool:
        """Return whether ``newcomer`` deserves the room of ``victim`` more than the victim does."""

    def stored(self, copy: Copy) -> None:  # noqa: B027 - most policies need not know
        """Note that ``copy`` has been reserved here: it has its room now. Once per copy, before it can be exposed."""

    def left(self, copy: Copy, evicted: bool) -> None:  # noqa: B027
        """Note that ``copy`` has left this place; ``evicted``: to make room, so it may be worth remembering."""
