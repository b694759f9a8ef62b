"""How exact a prompt's KV must be: what its request says counts, else its tenant's setting, else the deployment's.

docs/concepts/compression.md says what follows from the choice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import get_args

from vllm.exceptions import VLLMValidationError

from app.gate.kv_cache_field import FIELD, SAYS_NOTHING, KVCacheField
from kvmanager.segments.keys import EXACT, Fidelity


@dataclass(frozen=True, slots=True)
class FidelityRule:
    """The settings `kv.fidelity` and `tenants.NAME.fidelity`."""

    deployment: Fidelity = EXACT
    by_tenant: Mapping[str, Fidelity] = field(default_factory=dict)
    served: Collection[Fidelity] = get_args(Fidelity)

    def of(self, tenant: str, asked: KVCacheField = SAYS_NOTHING) -> Fidelity:
        """The fidelity of a tenant's prompt whose request says that.

        Raises VLLMValidationError (400) for a request that says what only prompts of another fidelity can have: it
        would believe that it was obeyed; and for a fidelity that is not served.
        """
        fidelity = asked.fidelity or self.by_tenant.get(tenant, self.deployment)
        param, only = asked.of_one_fidelity()
        if fidelity not in self.served:
            raise VLLMValidationError(f"This server has no prompts whose fidelity is `{fidelity}`.", parameter=FIELD)
        if only is not None and fidelity != only:
            raise VLLMValidationError(
                f"`{param}` concerns prompts whose fidelity is `{only}`; this one's is `{fidelity}`.",
                parameter=param,
            )
        return fidelity
