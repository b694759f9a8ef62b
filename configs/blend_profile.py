"""What `make profile-blend` found for a model: the layer and the share of tokens that blending uses by default.

One small JSON file beside the weights. It decides no KV that an exact or a tolerant prompt is answered with, so it is
no part of the model's identity: a new calibration keeps the cache warm.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.blend_section import Ratio
from configs.model_folder import find_model

logger = logging.getLogger(__name__)

BLEND_PROFILE_FILE = "crosskv_blend.json"


class BlendProfile(BaseModel):
    """One calibration."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    check_layer: int = Field(ge=1, description="Layers before it are computed whole; in it the tokens are chosen.")
    recompute_ratio: Ratio = Field(description="Share of the reused tokens that are computed anew.")


def read_blend_profile(model_source: Path | str) -> BlendProfile | None:
    """The calibration in a model's folder; None for none, and for one that cannot be read, with a line in the log."""
    try:
        folder = model_source if isinstance(model_source, Path) else find_model(model_source)
        path = folder / BLEND_PROFILE_FILE if isinstance(folder, Path) else None
        if path is None or not path.exists():
            return None
        return BlendProfile.model_validate_json(path.read_bytes())
    except (OSError, ValueError, ValidationError) as error:
        logger.warning("the blending calibration of %s (%s) is not used: %s", model_source, BLEND_PROFILE_FILE, error)
        return None
