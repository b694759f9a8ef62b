"""What a built engine gives to the parts around it: what steps it, all that load paths need, and the paths by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from configs.settings import Settings
from deployments.engine.groups import KVGroups
from deployments.engine.load_paths.base import LoadPath
from deployments.engine.load_paths.whole import WholePath
from deployments.engine.pool.control import PoolControl
from deployments.engine.request_saves import DenseSaves
from deployments.engine.request_scores import RequestScores
from deployments.protocol.kv_port import KVPort
from deployments.transfer.layerwise_step import LayerwiseStep
from deployments.transfer.segment_copy import SegmentCopier
from deployments.transfer.threads import KVTransfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from deployments.engine.heartbeat import Heartbeat

T = TypeVar("T")

PATHS: Mapping[str, str] = {
    "states": "deployments.engine.load_paths.states",
    "sparse": "deployments.engine.load_paths.sparse.path",
    "blend": "deployments.engine.load_paths.blending.path",
    "preempted": "deployments.engine.load_paths.preempted",
    "layerwise": "deployments.engine.load_paths.layerwise",
}
"""The module of each path, in the order in which they are asked. Its `build(parts)` makes the path.

A module is imported only where its path is wanted. A sparse prefix has names of its own and takes its request for
itself. A blend goes beyond what is stored. A preempted request has a new plan before anything is loaded by it.
"""


OF_GROUPS = frozenset({"preempted"})
"""Paths of `PATHS` that a model with windows or latents has too, and one that is spread over several processes: the
others reach into the step that computes."""
OF_STATES = frozenset({"states"})
"""The path of `PATHS` that a model with states has, and no other model."""


class EngineLoop(Protocol):
    """Steps the engine: `deployments.engine.host.EngineThread`, or vLLM's own process with ours in it."""

    heartbeat: Heartbeat
    on_turn: Callable[[], None]
    """Called on the engine thread after every step and after calls between steps; must not block or raise."""

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        ...

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        ...

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine thread, between two steps; from any thread."""
        ...

    def wake(self) -> None:
        """Wake the engine for an event that it may be waiting for. From any thread."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """What a built engine gives to the load paths that are built for it."""

    loop: EngineLoop
    config: VllmConfig
    settings: Settings
    fingerprint: bytes
    layer_names: Sequence[str]
    """vLLM's, in layer order."""
    ranks: int
    """Processes among which vLLM has spread the heads of every layer; 1: the model runs in this one."""
    groups: KVGroups
    block_size: int
    """Tokens."""
    max_held_blocks: int
    """Device blocks that requests of one path may hold while they wait."""
    port: KVPort
    copier: SegmentCopier
    transfer: KVTransfer
    layerwise: LayerwiseStep
    control: PoolControl
    saves: DenseSaves
    """Of the blocks of tokens."""
    scores: RequestScores
    states: SegmentCopier | None
    """What copies the states of a model that has any."""
    whole: WholePath

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.loop.scheduler


def build_paths(parts: EngineParts) -> dict[str, LoadPath]:
    """Return the paths that the settings name, in the order in which they are asked; the last one loads whole.

    Of a model whose layers do not all attend to everything, or keep latents, or whose ranks are processes of their own,
    only those that know of it.
    """
    kv = parts.settings.kv
    wanted = {*kv.load_paths, *(() if kv.layerwise.enabled == "off" else ("layerwise",))}
    if parts.states is not None:
        wanted &= OF_STATES
    else:
        wanted -= OF_STATES
    if parts.states is None and (parts.ranks > 1 or not parts.groups.has_layers_alone):
        wanted &= OF_GROUPS
    paths: dict[str, LoadPath] = {
        name: import_module(module).build(parts) for name, module in PATHS.items() if name in wanted
    }
    return {**paths, "whole": parts.whole}
