"""From a tokenized prompt to the keys under which its KV is known: the cache salt and the block hashes."""

from __future__ import annotations

from collections.abc import Sequence

from kvmanager import keys


class PromptKeys:
    """Derives salts and hashes for one model."""

    def __init__(self, fingerprint: bytes, block_size: int) -> None:
        """`fingerprint` is the replicas' `ModelIdentity.fingerprint()`, `block_size` theirs in tokens."""
        self.fingerprint = fingerprint
        self.block_size = block_size

    def salt(self, tenant: str, user_salt: str | None) -> str:
        """What separates this prompt's KV from everybody else's, at every tier and in the engine's own prefix cache.

        A tenant's requests are further separated by the request's own `cache_salt`, in which vLLM allows no NUL: so the
        pair can be read from the joined string in one way only.
        """
        return keys.cache_salt(self.fingerprint, f"{tenant}\0{user_salt or ''}", "exact")

    def hashes(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """The hashes, 32 bytes each, of the prompt's full blocks."""
        return list(keys.block_hashes(token_ids, self.block_size, salt))
