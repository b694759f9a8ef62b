"""Chunks of a blended prompt: what is asked of them, and what is found.

A chunk is stored as the exact prompt that consists of it alone, so it has a chain of its own in the index, from its
first block on. Where it stands in another prompt its tokens need not begin a block there. Only full blocks are stored:
the tokens after a chunk's last one are never found.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvmanager.segments.keys import BlockHash


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
