"""The groups in which vLLM keeps a model's KV: the one place that reads its cache specifications.

A group is the layers that share a block table. *Dense*: they attend to everything, and every block stays until the
request ends. *Window*: they attend to the last tokens only, and vLLM puts its null block in the place of what lies
before them. *State*: they keep a state of fixed size, of which a block holds what it was at the block's end, where a
step ended there. What cannot be described so is refused in words, and keeps vLLM's own prefix cache.

Leans on vLLM: `KVCacheConfig` (`kv_cache_groups`, `hash_block_size`, `cache_hit_alignment_tokens`), `iter_layer_specs`,
`FullAttentionSpec`, `SlidingWindowSpec`, `MambaSpec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec, iter_layer_specs

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


STATE = 0
"""In the place of a window's length: the group keeps no tokens, but a state."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """Groups of one model, numbered as vLLM numbers them, which have the same blocks; those of tokens the same heads
    and element type too."""

    windows: tuple[int | None, ...]
    """By group: tokens that its layers attend to, the current one included; None: all, it is dense; `STATE`: none."""
    group_of: dict[str, int]
    """By the name of a layer."""

    @property
    def is_plain(self) -> bool:
        """Whether one block table says where all of a sequence's KV lies."""
        return self.windows == (None,)

    @property
    def main(self) -> int:
        """The group that tells how far a prefix reaches on the device: the first dense one, if there is any."""
        return self.windows.index(None) if None in self.windows else 0

    @property
    def states(self) -> tuple[int, ...]:
        """The groups that keep a state; where there are any, exactly one other group is there, which is dense."""
        return tuple(group for group, window in enumerate(self.windows) if window == STATE)

    def runs(self, layer_names: Sequence[str]) -> list[tuple[range, int]]:
        """Cut layers, given by their names, into consecutive ones of one group; return each with its group."""
        found: list[tuple[range, int]] = []
        for group, names in groupby(layer_names, self.group_of.__getitem__):
            first = found[-1][0].stop if found else 0
            found.append((range(first, first + len(list(names))), group))
        return found


ONE_DENSE = KVGroups((None,), {})
"""A model of plain full attention, whose layers need no table."""


def read_groups(config: KVCacheConfig) -> KVGroups | str:
    """Return the groups of a built engine, or a sentence that says which one is not understood."""
    windows: list[int | None] = []
    shapes: set[tuple[Any, ...]] = set()
    blocks: set[int] = set()
    group_of: dict[str, int] = {}
    for number, group in enumerate(config.kv_cache_groups):
        specs: Sequence[Any] = list(iter_layer_specs(group.kv_cache_spec))
        if group.is_eagle_group or group.host_resident or not group.enable_kv_transfer:
            return f"group {number} of the model's KV cache is a draft's, or lies elsewhere than on the device"
        for spec in specs:
            if (why := _why_refused(spec)) is not None:
                return f"group {number} of the model's KV cache is {type(spec).__name__}: {why}"
        of_layers = {_window(spec) for spec in specs}
        if len(of_layers) != 1:
            return f"group {number} of the model's KV cache has windows of several lengths"
        windows.append(of_layers.pop())
        blocks |= {spec.block_size for spec in specs}
        shapes |= {(spec.num_kv_heads, spec.head_size, spec.dtype) for spec in specs if _window(spec) != STATE}
        group_of |= dict.fromkeys(group.layer_names, number)
    if len(shapes) > 1 or len(blocks) != 1:
        return f"the {len(windows)} groups of the model's KV cache differ in their blocks, heads or element types"
    if STATE in windows and [window for window in windows if window != STATE] != [None]:
        return "the model has states, and other layers than those of one group of full attention"
    units = {config.hash_block_size, config.cache_hit_alignment_tokens} - {None}
    if units - blocks:
        return "the model's blocks are hashed or found by other lengths than their own"
    return KVGroups(tuple(windows), group_of)


def _window(spec: Any) -> int | None:
    if type(spec) is MambaSpec:
        return STATE
    window: int | None = getattr(spec, "sliding_window", None)
    return window


def _why_refused(spec: Any) -> str | None:
    if type(spec) is MambaSpec:
        return _why_no_state(spec)
    if type(spec) is SlidingWindowSpec:
        plain = not spec.extra_retained_tokens and spec.page_size_padded is None
    else:
        plain = (
            type(spec) is FullAttentionSpec
            and spec.sliding_window is None
            and spec.attention_chunk_size is None
            and not spec.non_causal
        )
    if plain and spec.head_size == spec.head_size_v and spec.tokens_per_state == 1:
        return None
    return "neither plain full attention nor a plain sliding window"


def _why_no_state(spec: MambaSpec) -> str | None:
    if spec.mamba_type is not MambaAttentionBackendEnum.GDN_ATTN:
        return f"no test has moved states of the kind {spec.mamba_type.name}"
    if spec.mamba_cache_mode != "align":
        return f"its states are kept in mode {spec.mamba_cache_mode!r}, not at the ends of blocks"
    if spec.num_speculative_blocks:
        return "its states are moved while drafts are tried; leave speculative_config out of engine.extra_args"
    if spec.num_prefill_checkpoint_blocks:
        return "its states are kept at places inside a step (Mamba 2), which no test has moved"
    return None
