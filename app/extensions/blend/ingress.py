"""Blending as an ingress starts it: the ratios by which blends are named, and what finds the chunks of prompts."""

from __future__ import annotations

from app.extensions.blend.ratios import RatioRule
from app.extensions.blend.requests import BlendRequests, blend_requests
from app.gate.prompt_extra import FrontParts
from configs.settings import Settings
from kvmanager.segments.keys import BLENDED, Fidelity


class BlendingIngress:
    """See the module's docstring: an `IngressExtension`."""

    def __init__(self, settings: Settings) -> None:
        """Reads the model's calibration next to its weights."""
        self._settings = settings.blending
        self._ratios = RatioRule.from_settings(settings)
        blended: Fidelity = BLENDED
        self.variants = {blended: self._ratios.variant}

    def extra(self, parts: FrontParts) -> BlendRequests:
        """Make what finds chunks. Raises SettingsError for separators that cannot occur in a prompt."""
        return blend_requests(self._settings, parts, self._ratios)


def build(settings: Settings) -> BlendingIngress:
    """Make it."""
    return BlendingIngress(settings)
