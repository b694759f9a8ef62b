"""How exact a prompt's KV must be, and how much of a blended one is recomputed.

What its request says counts, else its tenant's setting, else the deployment's.

docs/concepts/compression.md and docs/concepts/blending.md say what follows from the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.exceptions import VLLMValidationError

from app.gate.kv_cache_field import SAYS_NOTHING, KVCacheField
from configs.blend_profile import read_blend_profile
from configs.blend_section import DEFAULT_RECOMPUTE_RATIO
from configs.settings import Settings
from kvmanager.segments.keys import BLENDED, EXACT, Fidelity


@dataclass(frozen=True, slots=True)
class FidelityRule:
    """The settings `kv.fidelity` and `tenants.NAME.fidelity`."""

    deployment: Fidelity = EXACT
    by_tenant: Mapping[str, Fidelity] = field(default_factory=dict)

    def of(self, tenant: str, asked: KVCacheField = SAYS_NOTHING) -> Fidelity:
        """The fidelity of a tenant's prompt whose request says that.

        Raises VLLMValidationError (400) for a request that says how to blend what will not be blended: it would believe
        that it was obeyed.
        """
        fidelity = asked.fidelity or self.by_tenant.get(tenant, self.deployment)
        param = asked.of_blending()
        if param is not None and fidelity != BLENDED:
            raise VLLMValidationError(
                f"`{param}` concerns prompts whose fidelity is `{BLENDED}`; this one's is `{fidelity}`.",
                parameter=param,
            )
        return fidelity


@dataclass(frozen=True, slots=True)
class RatioRule:
    """The settings `blending.recompute_ratio` and `tenants.NAME.recompute_ratio`, and the model's calibration."""

    deployment: float | None = None
    by_tenant: Mapping[str, float] = field(default_factory=dict)
    calibrated: float | None = None
    """None: the model is not calibrated."""

    @classmethod
    def from_settings(cls, settings: Settings) -> RatioRule:
        """Return the rule of this server; reads the calibration next to the weights."""
        profile, blending = read_blend_profile(settings.model_source), settings.blending
        calibrated = profile.recompute_ratio if profile else None
        return cls(blending.recompute_ratio, settings.of_tenants("recompute_ratio"), calibrated)

    def of(self, tenant: str, asked: KVCacheField = SAYS_NOTHING) -> float:
        """The share that the request names, else its tenant's, the deployment's, the calibrated one, CacheBlend's."""
        named = (asked.recompute_ratio, self.by_tenant.get(tenant), self.deployment, self.calibrated)
        return next((ratio for ratio in named if ratio is not None), DEFAULT_RECOMPUTE_RATIO)
