"""From a tokenized prompt to the keys under which its KV is known: the cache salt and the block hashes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from app.gate.kv_cache_field import SAYS_NOTHING, KVCacheField
from app.openai.fidelity import FidelityRule, RatioRule
from kvmanager.segments import keys
from kvmanager.segments.keys import BLENDED, EXACT, Fidelity
from kvmanager.segments.server_secret import ServerSecret

LONG_PROMPT_TOKENS = 8192
"""Hashing a prompt of this length takes some 1.5 ms."""


class PromptKeys:
    """Derives salts and hashes for one model, and knows which fidelity its tenants have."""

    def __init__(
        self,
        secret: ServerSecret,
        fingerprint: bytes,
        block_size: int,
        fidelity: FidelityRule | None = None,
        ratios: RatioRule | None = None,
    ) -> None:
        """`secret` is the server's, `fingerprint` the replicas' `ModelIdentity.fingerprint()`, `block_size` theirs in
        tokens."""
        self._secret = secret
        self.fingerprint = fingerprint
        self.block_size = block_size
        self.fidelity = fidelity or FidelityRule()
        self.ratios = ratios or RatioRule()

    def tag(self, tenant: str) -> str:
        """A tenant's name in the index, in quotas and in metrics; "" for no tenant."""
        return keys.tenant_tag(self._secret, tenant)

    def salt(self, tenant: str, user_salt: str | None, asked: KVCacheField = SAYS_NOTHING) -> str:
        """Return what separates this prompt's KV from others', at every tier and in the engine's own prefix cache.

        A tenant's requests are further separated by the request's own `cache_salt`, in which vLLM allows no NUL: so the
        pair can be read from the joined string in one way only. Each fidelity has a salt of its own: no name that an
        exact prompt has can be that of KV which was stored with loss, or blended. So has each sixteenth of a blend's
        ratio: a prompt that is computed whole finds nothing of what a lower ratio left. Raises as `FidelityRule.of`.
        """
        fidelity = self.fidelity.of(tenant, asked)
        return self._salt(tenant, user_salt, fidelity, self.ratios.of(tenant, asked) if fidelity == BLENDED else None)

    def exact_salt(self, tenant: str, user_salt: str | None) -> str:
        """The same of the tenant's exact prompts, which chunks have."""
        return self._salt(tenant, user_salt, EXACT, None)

    def _salt(self, tenant: str, user_salt: str | None, fidelity: Fidelity, ratio: float | None) -> str:
        return keys.cache_salt(self._secret, self.fingerprint, f"{tenant}\0{user_salt or ''}", fidelity, ratio)

    def hashes(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """The hashes, 32 bytes each, of the prompt's full blocks."""
        return list(keys.block_hashes(token_ids, self.block_size, salt))

    def twin_salt(self, tenant: str, user_salt: str | None, fidelity: Fidelity) -> str | None:
        """The salt that another prompt's tokens have in an exact one, which it may read; None for an exact one."""
        return None if fidelity == EXACT else self.exact_salt(tenant, user_salt)

    async def name_blocks(
        self, salt: str, twin_salt: str | None, token_ids: Sequence[int]
    ) -> tuple[list[bytes], list[bytes]]:
        """The hashes under a prompt's own salt and under its exact twin's; of a long one on a thread."""

        def name() -> tuple[list[bytes], list[bytes]]:
            return self.hashes(token_ids, salt), [] if twin_salt is None else self.hashes(token_ids, twin_salt)

        return await asyncio.to_thread(name) if len(token_ids) > LONG_PROMPT_TOKENS else name()
