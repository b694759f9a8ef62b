"""A manager whose eviction policy knows the future of the trace: the bound that no serving policy can pass."""

from collections.abc import Callable

from kvmanager.config import ManagerConfig
from kvmanager.index.eviction_policy import EvictionPolicy, PolicySetting
from kvmanager.index.nodes import Copy, Node
from kvmanager.index.score_heap import ScoreHeap
from kvmanager.manager import KVManager
from kvmanager.segments.keys import SegmentKey


class Belady(EvictionPolicy):
    """Evicts the exposed copy that is used again last."""

    def __init__(self, setting: PolicySetting, next_use: Callable[[SegmentKey], float]) -> None:
        super().__init__(setting)
        self._next_use = next_use
        self._exposed: ScoreHeap[Copy] = ScoreHeap()

    def expose(self, copy: Copy) -> None:  # noqa: D102 - the interface says it
        self._exposed.push(copy, -self._next_use(copy.node.key))

    def shield(self, copy: Copy) -> None:  # noqa: D102
        self._exposed.discard(copy)

    def used(self, copy: Copy) -> None:  # noqa: D102
        self._exposed.update(copy, -self._next_use(copy.node.key))

    def victim(self) -> Copy | None:  # noqa: D102
        return self._exposed.lowest()

    def admits(self, newcomer: Node, victim: Copy) -> bool:  # noqa: D102
        return self._next_use(newcomer.key) < self._next_use(victim.node.key)


def clairvoyant_manager(config: ManagerConfig, epoch: int, next_use: Callable[[SegmentKey], float]) -> KVManager:
    """The manager that serves, with `Belady` for every policy. ``next_use`` as of the request being served."""
    return KVManager(config, epoch, lambda setting: Belady(setting, next_use))
