"""The settings of blending (`blending`): KV of chunks that are no prefix, reused at any place of a prompt."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.section import Section

DEFAULT_CHECK_LAYER = 2
DEFAULT_RECOMPUTE_RATIO = 0.15
"""Both from CacheBlend (arXiv 2405.16444, section 6), where no calibration says better (`make profile-blend`)."""

Ratio = Annotated[float, Field(ge=0, le=1)]
Separator = Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class BlendSettings(Section):
    """KV of chunks that are no prefix, for prompts that ask for `blended` KV (docs/concepts/blending.md)."""

    separators: list[Separator] | None = Field(
        None,
        description="What a chunk begins with: texts, or lists of token ids. Empty: the template's document token, or "
        "each special token where it has none.",
    )
    fill: Literal["idle", "first", "manual"] = Field(
        "idle",
        description="When the KV of a missing chunk is computed. `idle`: when no prompt is under way. "
        "`first`: at once, before the prompt that brings it. `manual`: when `POST /api/v1/kv/fill` orders it.",
    )
    recompute_ratio: Ratio | None = Field(
        None,
        description="Share of the reused tokens whose KV is recomputed. Empty: what `make profile-blend` found for "
        "the model, else 0.15.",
    )
