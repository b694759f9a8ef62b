"""The settings of layerwise transfer (`kv.layerwise`): KV moves by groups of layers, under the computation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from configs.section import Section, word_of_yaml

GROUPS = 8
"""Groups of layers that a model has: an eighth is what cannot hide."""


class LayerwiseSettings(Section):
    """Layerwise transfer: KV moves a group of layers at a time, while the engine computes the others."""

    enabled: Literal["auto", "on", "off"] = Field(
        "auto",
        description="`auto`: load layerwise where that hides more than loading whole prefixes, and save layerwise on "
        "CUDA. `on`: wherever a tier can bring layers. `off`: never.",
    )

    @field_validator("enabled", mode="before")
    @classmethod
    def _enabled_may_be_unquoted(cls, value: Any) -> Any:
        return word_of_yaml(value)

    def saves(self, on_cuda: bool) -> bool:
        """Whether KV is saved layerwise too. On the CPU backend that brings nothing (docs/concepts/loading.md)."""
        return self.enabled == "on" or (self.enabled == "auto" and on_cuda)

    def layers_per_group(self, layers: int) -> int:
        """Return the number of layers that move together, for a model with `layers` layers."""
        return max(1, layers // GROUPS)
