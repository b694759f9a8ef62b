"""The settings of blending (`blending`), and a model's calibration: the check layer and ratio where no setting has
them.

Blending reuses KV of chunks that are no prefix, at any place of a prompt. `make profile-blend` writes the calibration,
one small JSON file next to the weights. It affects no KV of exact or tolerant prompts, so it is no part of the model's
identity (`deployments/engine/model_identity.py`): a new calibration keeps the cache warm. Blended names do not depend
on it either, as any blended prompt may read what another one blended.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.errors import one_sentence
from configs.model_folder import find_model
from configs.section import Section

logger = logging.getLogger(__name__)

BLEND_PROFILE_FILE = "crosskv_blend.json"
MOST_BYTES = 64 * 1024
DEFAULT_CHECK_LAYER = 2
DEFAULT_RECOMPUTE_RATIO = 0.15
"""Both from CacheBlend (arXiv 2405.16444, section 6), where no calibration says better (`make profile-blend`)."""

Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
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


class BlendProfile(BaseModel):
    """One calibration. `check_layer` and `recompute_ratio` are used; the rest says where they come from."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    check_layer: int = Field(ge=1, description="Layers before it are computed whole; in it the tokens are chosen.")
    recompute_ratio: Ratio = Field(description="Share of the reused tokens that are computed again.")
    kl: Finite = Field(description="Mean KL in nats of the next token's distribution that these two cost.")
    prompts: int = Field(ge=1, description="How many prompts that is the mean of.")
    seed: int = 0
    versions: dict[str, str] = Field(default_factory=dict)


def profile_folder(model: Path | str, revision: str | None = None) -> Path | None:
    """The folder of a model's weights: its own, or a hub id's snapshot on this machine; None where there is none.

    `model` is what `find_model` returns. Reads the hub's cache on disk and fetches nothing.
    """
    if isinstance(model, Path):
        return model
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def read_blend_profile(model_source: Path | str, revision: str | None = None) -> BlendProfile | None:
    """The calibration of a model (`model:` of the settings, or its folder); None for none.

    A file that cannot be read or says what cannot be is warned about, once per call, and counts as none: call it at the
    start, not per request.
    """
    try:
        source = model_source if isinstance(model_source, Path) else find_model(model_source)
        folder = profile_folder(source, revision)
        path = folder / BLEND_PROFILE_FILE if folder else None
        if path is None or not path.exists():
            return None
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError("it is far too large")
        return BlendProfile.model_validate_json(content)
    except ValidationError as error:
        reason = one_sentence(error, BlendProfile)
    except (OSError, ValueError) as error:
        reason = str(error)
    logger.warning(
        "%s of %s is not used: %s. Make it again with make profile-blend.",
        BLEND_PROFILE_FILE,
        model_source,
        reason.rstrip("."),
    )
    return None
