"""The settings of roles (`roles`): replicas that prefill, and replicas that decode."""

from __future__ import annotations

from pydantic import Field, model_validator

from configs.section import Section


class RolesSettings(Section):
    """Replicas that prefill prompts and replicas that decode answers (docs/concepts/roles.md); off by default."""

    prefill: int = Field(
        0, ge=0, description="Replicas that prefill. With `roles.decode` it adds up to `replicas`; both 0: no roles."
    )
    decode: int = Field(0, ge=0, description="Replicas that decode.")
    handover_deadline_s: float = Field(
        0.5,
        gt=0,
        le=60,
        description="How long a first token's answer may wait for its KV to be stored, before the decode replica goes "
        "on. What is not stored by then is computed again. The client has the token meanwhile.",
    )
    least_tokens: int = Field(
        256,
        ge=1,
        description="Prompts of which less is to be computed stay whole on a decode replica, until the break-even of a "
        "hand-over has been measured; never less than this.",
    )

    @property
    def on(self) -> bool:
        """Whether there are roles."""
        return self.prefill > 0

    @model_validator(mode="after")
    def _both_or_none(self) -> RolesSettings:
        if (self.prefill > 0) != (self.decode > 0):
            missing, there = ("decode", "prefill") if self.prefill else ("prefill", "decode")
            raise ValueError(
                f"a server with {there} replicas needs {missing} replicas too; set {missing} to at least 1, or both to "
                f"0"
            )
        return self
