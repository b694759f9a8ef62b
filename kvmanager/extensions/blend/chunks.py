"""A blended prompt: what is asked of its chunks, what is found of them, and what names the blend.

A chunk is stored as the exact prompt that consists of it alone, so it has a chain of its own in the index, from its
first block on. Where it stands in another prompt its tokens need not begin a block there. Only full blocks are stored:
the tokens after a chunk's last one are never found.

A blend is named by the share of its reused tokens that is recomputed, in steps, as the variant of its salt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvmanager.moves.plan import PlannedLoad, PlanQuery
from kvmanager.segments.keys import BlockHash

BLEND: Final = "blend"
"""Name of a `BlendQuery` in a query's extras, of a `PlannedBlend` in a plan's, and of samples of blends."""
BLENDS: Final = "blend"
"""Reason of a plan that blends chunks, behind what is loaded of the prompt's own chain, if any."""
RATIO_STEPS: Final = 16
"""Shares of a blend that is computed have as many names, and one more for 0."""


class ChunkQuery(NamedTuple):
    """A chunk of a prompt to be planned: its place, its length, and its hashes as an exact prompt of its own."""

    start_token: int
    tokens: int
    hashes: Sequence[BlockHash]


class BlendTerms(NamedTuple):
    """How a replica blends, for the manager to judge what a blend would take: of a model with ``layers`` layers.

    Layers before ``check_layer`` are computed whole.
    """

    check_layer: int
    layers: int


class BlendQuery(NamedTuple):
    """What a replica asks of the manager in addition to a blended prompt's own hashes.

    ``ratio``: the share of the reused tokens that is recomputed. Chunks are in order and do not overlap.
    """

    chunks: Sequence[ChunkQuery]
    ratio: float
    terms: BlendTerms


class PlannedChunk(NamedTuple):
    """What is stored of a blended prompt's chunk that begins at token ``start_token``: its leading blocks.

    Blocks of ``loads`` are numbered from the chunk's first one on, and follow each other as those of a plan. Its blocks
    before the end of the prompt's prefix are not needed.
    """

    start_token: int
    loads: tuple[PlannedLoad, ...]

    @property
    def blocks(self) -> int:
        """Number of the chunk's leading blocks that are stored."""
        return self.loads[-1].end_block


@dataclass(frozen=True, slots=True)
class PlannedBlend:
    """What a blended prompt reuses beyond its prefix, and how; in a plan only where that is sooner than a prefill.

    ``chunks`` lie behind the prefix that the plan's own segments and the device bring, in order, without overlap; their
    segments are under the plan's lease. ``ratio`` is the share of their tokens that is recomputed, chosen at layer
    ``check_layer``; layers before it are computed whole.
    """

    chunks: tuple[PlannedChunk, ...]
    ratio: float
    check_layer: int
    seconds: float = 0.0
    """How long the blend should take by the rates of prefills and loads, without corrections from earlier blends; 0:
    not known. The replica reports it with the time that the blend took: an `ExtensionSample` of
    `kvmanager.loading.load_rates`."""


def asked_blend(query: PlanQuery) -> BlendQuery | None:
    """Return what a query asks of chunks; None: nothing."""
    asked: BlendQuery | None = query.extras.get(BLEND)
    return asked


def ratio_step(recompute_ratio: float) -> int:
    """Return the sixteenth, 0 to `RATIO_STEPS`, under which blends are named that compute this share of their tokens.

    The nearest one; but the first and the last are of 0 and 1 alone: what computes a little differs most from what
    computes nothing, and what computes all is right. Raises ValueError for what is no share.
    """
    if not 0 <= recompute_ratio <= 1:
        raise ValueError(f"recompute_ratio is a share from 0 to 1, got {recompute_ratio}")
    if recompute_ratio in (0, 1):
        return RATIO_STEPS * int(recompute_ratio)
    return min(max(round(RATIO_STEPS * recompute_ratio), 1), RATIO_STEPS - 1)


def blend_variant(recompute_ratio: float) -> str:
    """Return the variant of `kvmanager.segments.keys.cache_salt` for such blends. Raises ValueError as `ratio_step`."""
    return str(ratio_step(recompute_ratio))
