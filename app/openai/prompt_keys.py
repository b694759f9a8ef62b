"""From a tokenized prompt to the keys under which its KV is known: its fidelity, the cache salt and the block hashes.

How exact a prompt's KV must be its request says, else its tenant's setting, else the deployment's.
docs/concepts/compression.md says what follows from the choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from vllm.exceptions import VLLMValidationError

from app.gate.kv_cache_field import FIELD, SAYS_NOTHING, KVCacheField
from app.gate.prompt_extra import Variant
from kvmanager.segments import keys
from kvmanager.segments.keys import EXACT, AdapterName, Fidelity
from kvmanager.segments.server_secret import ServerSecret

LONG_PROMPT_TOKENS = 8192
"""Hashing a prompt of this length takes some 1.5 ms."""


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


class PromptKeys:
    """Derives salts and hashes for one model, and knows which fidelity its tenants have."""

    def __init__(
        self,
        secret: ServerSecret,
        fingerprint: bytes,
        block_size: int,
        fidelity: FidelityRule | None = None,
        variants: Mapping[Fidelity, Variant] | None = None,
        adapters: Mapping[str, AdapterName] | None = None,
        model: str = "",
    ) -> None:
        """`secret` is the server's, `fingerprint` the replicas' `ModelIdentity.fingerprint()`, `block_size` theirs in
        tokens. `variants`: of fidelities that extensions serve. `adapters`: LoRA adapters by the name that clients ask
        for; `model`: the model's own.

        Where a method takes a `model`, it is that of the request: an adapter's name, or any other for the model itself.
        """
        self._secret = secret
        self.fingerprint = fingerprint
        self.block_size = block_size
        self.fidelity = fidelity or FidelityRule()
        self._variants = variants or {}
        self.adapters = adapters or {}
        self._model = model

    def tag(self, tenant: str) -> str:
        """A tenant's name in the index, in quotas and in metrics; "" for no tenant."""
        return keys.tenant_tag(self._secret, tenant)

    def salt(
        self, tenant: str, user_salt: str | None, asked: KVCacheField = SAYS_NOTHING, model: str | None = None
    ) -> str:
        """Return what separates this prompt's KV from others', at every tier and in the engine's own prefix cache.

        A tenant's requests are further separated by the request's own `cache_salt`, in which vLLM allows no NUL: so the
        pair can be read from the joined string in one way only. Each fidelity has a salt of its own: no name that an
        exact prompt has can be that of KV which is not exact. So has each variant of one. Raises as `FidelityRule.of`.
        """
        fidelity = self.fidelity.of(tenant, asked)
        of_variant = self._variants.get(fidelity)
        variant = of_variant(asked) if of_variant is not None else ""
        return self._salt(tenant, user_salt, fidelity, variant, model)

    def exact_salt(self, tenant: str, user_salt: str | None, model: str | None = None) -> str:
        """The same of the tenant's exact prompts, which chunks have."""
        return self._salt(tenant, user_salt, EXACT, "", model)

    def _salt(self, tenant: str, user_salt: str | None, fidelity: Fidelity, variant: str, model: str | None) -> str:
        whose = f"{tenant}\0{user_salt or ''}"
        return keys.cache_salt(self._secret, self.fingerprint, whose, fidelity, variant, self.adapter(model))

    def adapter(self, model: str | None) -> AdapterName | None:
        """The LoRA adapter that a request for `model` is answered by; None: the model itself."""
        return self.adapters.get(model) if model is not None else None

    def require_model(self, model: str | None) -> None:
        """Raise VLLMValidationError (400) for a name that neither the model nor an adapter has; None: the model."""
        if model is not None and model != self._model and model not in self.adapters:
            raise VLLMValidationError(f"The model `{model[:128]}` does not exist.", parameter="model")

    def hashes(self, token_ids: Sequence[int], salt: str, model: str | None = None) -> list[bytes]:
        """The hashes, 32 bytes each, of the prompt's full blocks."""
        return list(keys.block_hashes(token_ids, self.block_size, salt, self.adapter(model)))

    async def name_blocks(
        self, salt: str, exact_salt: str | None, token_ids: Sequence[int], model: str | None = None
    ) -> tuple[list[bytes], list[bytes]]:
        """The hashes under a prompt's own salt, and under an exact one's if given; of a long prompt on a thread."""

        def name() -> tuple[list[bytes], list[bytes]]:
            exact = [] if exact_salt is None else self.hashes(token_ids, exact_salt, model)
            return self.hashes(token_ids, salt, model), exact

        return await asyncio.to_thread(name) if len(token_ids) > LONG_PROMPT_TOKENS else name()
