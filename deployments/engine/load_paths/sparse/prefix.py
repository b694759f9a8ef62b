"""A sparse prefix: M blocks of a sequence, of which each layer keeps some. Pure: any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmanager.extensions.sparse.retained_prefixes import PlannedSparse
from kvmanager.moves.plan import PlannedLoad


@dataclass(frozen=True, slots=True)
class SparsePrefix:
    """The first `blocks` blocks of a sequence; layer l keeps `kept[l]` blocks of keys, in the last of the slots.

    Raises ValueError for what no prefix can be.
    """

    blocks: int
    kept: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.blocks < 1 or not self.kept:
            raise ValueError(f"a sparse prefix has at least one block and one layer, not {self.blocks} and {self.kept}")
        if not all(0 <= kept <= self.blocks for kept in self.kept):
            raise ValueError(f"of {self.blocks} blocks a layer keeps 0 to {self.blocks}, not {self.kept}")

    @property
    def shifts(self) -> tuple[int, ...]:
        """Of each layer, the leading block slots that hold nothing."""
        return tuple(self.blocks - kept for kept in self.kept)


def why_not_prefix(prefix: SparsePrefix, layers: int, block_size: int, prompt_tokens: int) -> str | None:
    """A sentence where a prompt of `prompt_tokens` cannot begin with the prefix; None where it can."""
    if len(prefix.kept) != layers:
        return f"the sparse prefix has {len(prefix.kept)} layers, and the model {layers}"
    if prefix.blocks * block_size >= prompt_tokens:
        return (
            f"the sparse prefix has {prefix.blocks * block_size} tokens, and of {prompt_tokens} tokens of a prompt "
            "the last one at least is computed"
        )
    return None


def first_slots(prefix: SparsePrefix, kept_of_segments: Sequence[Sequence[int]]) -> list[list[int]]:
    """The slot in which each segment's kept blocks begin, per segment and layer: right-aligned, in order.

    `kept_of_segments[i][l]`: blocks that layer l keeps of segment i. Raises ValueError where they do not add up.
    """
    slots = list(prefix.shifts)
    first: list[list[int]] = []
    for kept in kept_of_segments:
        if len(kept) != len(slots) or min(kept) < 0:
            raise ValueError(f"{list(kept)} are not the kept blocks of {len(slots)} layers")
        first.append(list(slots))
        slots = [slot + count for slot, count in zip(slots, kept, strict=True)]
    if set(slots) != {prefix.blocks}:
        raise ValueError(f"the segments keep {list(kept_of_segments)} blocks, and not {prefix.kept} together")
    return first


@dataclass(frozen=True)
class PlannedPrefix:
    """What a sparse request presents, and what brings it. `slots`: where each segment's kept blocks begin, by layer."""

    prefix: SparsePrefix
    loads: Sequence[PlannedLoad]
    kept: Sequence[Sequence[int]]
    slots: list[list[int]]
    forms: Sequence[bytes]
    digest: bytes


def planned_prefix(planned: PlannedSparse) -> PlannedPrefix:
    """Raises ValueError for a plan whose segments do not follow each other, or do not add up to the prefix."""
    loads, kept, forms = planned.loads, planned.kept, planned.forms
    if not loads:
        raise ValueError("a sparse prefix has at least one segment")
    starts = [0, *(load.end_block for load in loads)]
    if len(kept) != len(loads) or [load.start_block for load in loads] != starts[:-1]:
        raise ValueError("the segments of a sparse prefix follow each other from its first block on")
    if any(load.used_blocks not in (0, load.num_blocks) for load in loads):
        raise ValueError("a sparse segment is used whole: which of its tokens are kept depends on all of them")
    prefix = SparsePrefix(planned.blocks, tuple(map(sum, zip(*kept, strict=True))))
    if len(forms) != len(loads):
        raise ValueError("each segment of a sparse prefix has a form")
    return PlannedPrefix(prefix, loads, kept, first_slots(prefix, kept), forms, planned.digest)
