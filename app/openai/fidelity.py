"""How true a prompt's KV must be: what its request says, else its tenant's setting, else the deployment's.

docs/concepts/compression.md and docs/concepts/blending.md say what follows from the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.exceptions import VLLMValidationError

from app.gate.kv_cache_field import SAYS_NOTHING, KVCacheField
from kvmanager.segments.keys import BLENDED, EXACT, Fidelity


@dataclass(frozen=True, slots=True)
class FidelityRule:
    """The settings `kv.fidelity` and `kv.tenant_fidelity`."""

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
