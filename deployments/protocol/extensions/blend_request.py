"""What a blended prompt brings to a replica in `GenerateRequest.extras`, under the name of the blend's load path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class PromptChunk(NamedTuple):
    """A run of a blended prompt's tokens, from `start_token` on, that is stored as the prompt of these tokens alone.

    `block_hashes` are those of its full blocks, as an exact prompt has them; `tokens` is its whole length.
    """

    start_token: int
    tokens: int
    block_hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class BlendRequest:
    """A blended prompt's chunks, in order and without overlap.

    `chunk_salt` is that of the tenant's exact prompts, under which a chunk is computed alone. `recompute_ratio` is the
    share of reused tokens that is recomputed.
    """

    chunks: list[PromptChunk]
    chunk_salt: str
    recompute_ratio: float
