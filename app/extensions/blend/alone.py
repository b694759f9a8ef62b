"""Chunks that are given by themselves, in no prompt: the tokens that they will have in prompts that bring them.

A text with separators in it holds the chunks that those begin, as a prompt would. Any other is what requests name
(`kv_cache.chunks`): its two ends may merge with what stands around it, and are left out (`app.extensions.blend.given`).

Pure: any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.extensions.blend.given import own_tokens
from app.extensions.blend.recognition import Separators


def chunks_of_text(token_ids: Sequence[int], separators: Separators, min_tokens: int) -> list[list[int]]:
    """The chunks of a text with these tokens, of at least `min_tokens`; none: all are shorter."""
    begun = separators.begun(token_ids)
    chunks = [token_ids[span.start : span.end] for span in begun] if begun else [own_tokens(token_ids)]
    return [list(chunk) for chunk in chunks if len(chunk) >= min_tokens]
