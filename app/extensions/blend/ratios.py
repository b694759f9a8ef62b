"""How much of a blended prompt is recomputed: what its request says, else the deployment, the model."""

from __future__ import annotations

from dataclasses import dataclass

from app.gate.kv_cache_field import SAYS_NOTHING, KVCacheField
from configs.blending import DEFAULT_RECOMPUTE_RATIO, read_blend_profile
from configs.settings import Settings
from kvmanager.extensions.blend.names import blend_variant


@dataclass(frozen=True, slots=True)
class RatioRule:
    """The setting `blending.recompute_ratio`, and the model's calibration."""

    deployment: float | None = None
    calibrated: float | None = None
    """None: the model is not calibrated."""

    @classmethod
    def from_settings(cls, settings: Settings) -> RatioRule:
        """Return the rule of this server; reads the calibration next to the weights."""
        profile, blending = read_blend_profile(settings.model_source), settings.blending
        calibrated = profile.recompute_ratio if profile else None
        return cls(blending.recompute_ratio, calibrated)

    def of(self, asked: KVCacheField = SAYS_NOTHING) -> float:
        """The share that the request names, else the deployment's, the calibrated one, CacheBlend's."""
        named = (asked.recompute_ratio, self.deployment, self.calibrated)
        return next((ratio for ratio in named if ratio is not None), DEFAULT_RECOMPUTE_RATIO)

    def variant(self, asked: KVCacheField = SAYS_NOTHING) -> str:
        """What tells blends of this share from others: each sixteenth of it has names of its own."""
        return blend_variant(self.of(asked))
