"""The settings of one tenant (`tenants`): its parts of what all share, and what it has instead of the server's own."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field

from configs.kv_section import Fidelity
from configs.section import Section

Quota = Annotated[ByteSize, Field(gt=0)]


class TenantSettings(Section):
    """What one tenant has of its own."""

    cpu_bytes: Quota | None = Field(
        None,
        description="The part of each CPU tier that is its own. It gets no more, and no other tenant gets it. Tenants "
        "without one share the rest.",
    )
    redis_bytes: Quota | None = Field(None, description="The part of Redis that is its own, in the same way.")
    pin_bytes: Quota | None = Field(
        None, description="Its part of `kv.pin_budget_bytes`. The other tenants get equal parts of the rest."
    )
    fidelity: Fidelity | None = Field(
        None, description="Its own `kv.fidelity`, where the request says nothing. Empty: the server's."
    )
    requests_per_minute: int | None = Field(
        None, ge=0, description="Its own `http.requests_per_minute`. 0: no limit. Empty: the server's."
    )
    tokens_per_minute: int | None = Field(
        None, ge=0, description="Its own `http.tokens_per_minute`. 0: no limit. Empty: the server's."
    )
    weight: float = Field(
        1.0,
        ge=0.01,
        le=100,
        description="Its share of what is computed while several wait, against the others': 2 gets twice as much as 1. "
        "A sampled token counts as two of a prompt, a reused one almost nothing.",
    )
