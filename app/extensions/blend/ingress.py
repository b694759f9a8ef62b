"""Blending as an ingress starts it: ratios that name blends, what finds chunks, and what computes missing ones."""

from __future__ import annotations

from fastapi import APIRouter

from app.extensions.blend.precompute import orders
from app.extensions.blend.precompute.precompute import Precompute, precompute_of
from app.extensions.blend.requests import BlendRequests, RatioRule, blend_requests
from app.gate.prompt_extra import FrontParts, RouteParts, SendParts
from configs.settings import Settings
from kvmanager.segments.keys import BLENDED, Fidelity


class BlendingIngress:
    """See the module's docstring: an `IngressExtension`."""

    paths = orders.PATHS

    def __init__(self, settings: Settings) -> None:
        """Reads the model's calibration next to its weights."""
        self._settings = settings
        self._ratios = RatioRule.from_settings(settings)
        blended: Fidelity = BLENDED
        self.variants = {blended: self._ratios.variant}

    def extra(self, parts: FrontParts) -> BlendRequests:
        """Make what finds chunks. Raises SettingsError for separators that cannot occur in a prompt."""
        return blend_requests(self._settings.blending, parts, self._ratios)

    def preparation(self, parts: SendParts) -> Precompute:
        """Make what computes missing chunks."""
        return precompute_of(self._settings, parts)

    def router(self, extra: BlendRequests, preparation: Precompute, parts: RouteParts) -> APIRouter:
        """Make the route that orders chunks."""
        return orders.precompute_router(preparation, extra, parts, self._settings)


def build(settings: Settings) -> BlendingIngress:
    """Make it."""
    return BlendingIngress(settings)
