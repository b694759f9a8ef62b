"""The groups in which vLLM keeps a model's KV: the one place that reads its cache specifications.

A group is the layers that share a block table. *Dense*: they attend to everything, and every block stays until the
request ends. *Window*: they attend to the last tokens only, and vLLM puts its null block in the place of what lies
before them. *State*: they keep a state of fixed size, of which a block holds what it was at the block's end, where a
step ended there. A dense group may keep latents (MLA): one vector a token that is neither key nor value. What cannot
be described so is refused in words, and keeps vLLM's own prefix cache.

Leans on vLLM: `KVCacheConfig` (`kv_cache_groups`, `hash_block_size`, `cache_hit_alignment_tokens`), `iter_layer_specs`,
`FullAttentionSpec`, `MLAAttentionSpec`, `SlidingWindowSpec`, `MambaSpec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    iter_layer_specs,
)

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
    latents: bool = False
    """Whether the layers of its only group keep latents, and no keys and values."""

    @property
    def is_plain(self) -> bool:
        """Whether one block table says where all of a sequence's KV lies."""
        return self.windows == (None,)

    @property
    def has_layers_alone(self) -> bool:
        """Whether what reaches into the step that computes, layer by layer, knows of such a model."""
        return self.is_plain and not self.latents

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
        for is_so, words in (
            (group.is_eagle_group, "is a draft's, whose KV depends on the next token"),
            (group.host_resident, "lies in host memory"),
            (not group.enable_kv_transfer, "is a copy that vLLM makes of another one"),
        ):
            if is_so:
                return f"group {number} of the model's KV cache {words}"
        for spec in specs:
            if (why := _why_refused(spec)) is not None:
                return f"group {number} of the model's KV cache is {type(spec).__name__}: {why}"
        of_layers = {_window(spec) for spec in specs}
        if len(of_layers) != 1:
            return f"group {number} of the model's KV cache has windows of several lengths"
        windows.append(of_layers.pop())
        blocks |= {spec.block_size for spec in specs}
        shapes |= {
            (type(spec) is MLAAttentionSpec, spec.num_kv_heads, spec.head_size, spec.dtype)
            for spec in specs
            if _window(spec) != STATE
        }
        group_of |= dict.fromkeys(group.layer_names, number)
    if len(shapes) > 1 or len(blocks) != 1:
        return f"the {len(windows)} groups of the model's KV cache differ in their blocks, heads or element types"
    if STATE in windows and [window for window in windows if window != STATE] != [None]:
        return "the model has states, and other layers than those of one group of full attention"
    latents = any(of_mla for of_mla, *_ in shapes)
    if latents and len(windows) > 1:
        return "the model keeps latents (MLA), and no test has moved these together with another group's KV"
    units = {config.hash_block_size, config.cache_hit_alignment_tokens} - {None}
    if units - blocks:
        return "the model's blocks are hashed or found by other lengths than their own"
    return KVGroups(tuple(windows), group_of, latents)


_OTHER_KINDS = {
    "ChunkedLocalAttentionSpec": "it attends to its own chunk only",
    "CircularBufferSpec": "it keeps a ring of the last tokens, which begins no other prompt",
    "CrossAttentionSpec": "it attends to what an encoder has made",
    "EncoderOnlyAttentionSpec": "it is an encoder's",
    "HiSparseHotSpec": "it keeps a changing part of KV that lies in host memory",
    "HiSparseResidentSpec": "it keeps a changing part of KV that lies in host memory",
    "HiddenStateCacheSpec": "it keeps hidden states, for a draft",
    "RSWASpec": "what it keeps depends on where a prompt ends and its answer begins",
    "SinkFullAttentionSpec": "it keeps sinks in blocks of their own",
    "SlidingWindowMLASpec": "it keeps latents (MLA) of a window",
}
"""What vLLM's other kinds of cache are, by the name of their class."""


def _window(spec: Any) -> int | None:
    if type(spec) is MambaSpec:
        return STATE
    window: int | None = getattr(spec, "sliding_window", None)
    return window


def _why_refused(spec: Any) -> str | None:
    """Return what about a layer's cache is not understood; None: it is full attention, a window, latents or a state."""
    kind = type(spec)
    if kind is MambaSpec:
        return _why_no_state(spec)
    if kind is MLAAttentionSpec:
        return _why_no_latents(spec)
    if kind not in (FullAttentionSpec, SlidingWindowSpec):
        return _OTHER_KINDS.get(kind.__name__, "no test has moved KV of this kind")
    found: tuple[tuple[Any, str], ...]
    if kind is SlidingWindowSpec:
        found = (
            (spec.extra_retained_tokens, "its window is kept longer, for drafts"),
            (spec.page_size_padded is not None, "its blocks are padded"),
        )
    else:
        found = (
            (spec.sliding_window is not None, "it attends to a window that vLLM keeps as full attention"),
            (spec.attention_chunk_size is not None, "it attends to its own chunk, which vLLM keeps as full attention"),
            (spec.non_causal, "its tokens attend to later ones"),
        )
    both = (
        (spec.head_size != spec.head_size_v, "its keys and values differ in size"),
        (spec.tokens_per_state != 1, "it keeps several tokens as one"),
    )
    return next((why for is_so, why in (*found, *both) if is_so), None)


def _why_no_latents(spec: MLAAttentionSpec) -> str | None:
    sparse = spec.is_index_group_leader or spec.cache_role is not SparseCacheRole.SPARSE
    packed = spec.state_content_bytes is not None or spec.kv_quant_mode is not KVQuantMode.NONE
    found: tuple[tuple[Any, str], ...] = (
        (sparse, "an index chooses which of its latents (MLA) are attended to, and is not moved with them"),
        (spec.model_version is not None, f"it keeps latents (MLA) in the form of {spec.model_version}"),
        (packed, f"its latents (MLA) are packed with scales, as {spec.cache_dtype_str}"),
        (spec.page_size_padded is not None, "its latents' (MLA) blocks are padded"),
        (spec.tokens_per_state != 1, "it keeps several tokens as one latent (MLA)"),
        (spec.sliding_window is not None or spec.attention_chunk_size is not None, "its latents (MLA) are a window's"),
        (spec.non_causal or spec.non_causal_multi_token_decode, "its tokens attend to later ones"),
        ((spec.num_kv_heads, spec.head_size_v) != (1, 0), "its latents (MLA) have several heads, or values"),
    )
    return next((why for is_so, why in found if is_so), None)


_MOVED_STATES = frozenset(
    {MambaAttentionBackendEnum.GDN_ATTN, MambaAttentionBackendEnum.MAMBA2, MambaAttentionBackendEnum.SHORT_CONV}
)


def _why_no_state(spec: MambaSpec) -> str | None:
    if spec.mamba_type not in _MOVED_STATES:
        return f"it keeps a state instead of KV, and no test has moved states of the kind {spec.mamba_type.name}"
    if spec.mamba_cache_mode != "align":
        return f"its states are kept in mode {spec.mamba_cache_mode!r}, not at the ends of blocks"
    if spec.num_speculative_blocks:
        return "its states are moved while drafts are tried; leave speculative_config out of engine.extra_args"
    if spec.num_prefill_checkpoint_blocks:
        return "its states are kept at places inside a step (Mamba 2), which no test has moved"
    return None
