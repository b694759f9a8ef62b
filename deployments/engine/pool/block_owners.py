"""Whose KV a device pool holds, by tenant tag: a block's hash does not tell, and a tenant may clear its own.

A sequence belongs to the tenant whose request or promotion brought its first block; every later block belongs to the
tenant of the block before it. A block that is found without the one before it (which was cleared while the request that
computes it ran) is looked up among the running requests. Blocks without a tenant are not remembered. An entry per block
of the pool at most, and `MOST_CLAIMS` beginnings. Engine thread only; O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

MOST_CLAIMS = 8192
"""Beginnings that were announced and are not in the pool yet, or any more; more than an engine admits at once."""


class BlockOwners:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.find: Callable[[bytes], str] = lambda block_hash: ""
        """The tenant of the running request that has this block; empty: none has."""
        self._owners: dict[bytes, str] = {}
        self._claims: OrderedDict[bytes, str] = OrderedDict()

    def claim(self, first_hash: bytes, tenant: str) -> None:
        """A sequence that begins with this block is about to be brought or computed for a tenant."""
        if tenant:
            self._claims[first_hash] = tenant
            self._claims.move_to_end(first_hash)
            if len(self._claims) > MOST_CLAIMS:
                self._claims.popitem(last=False)

    def stored(self, hashes: Sequence[bytes], before: bytes | None) -> None:
        """Consecutive blocks have entered the pool, after the block `before`, or as the first of a sequence."""
        if not hashes or not (self._claims or self._owners):
            return
        owner = self._claims.get(hashes[0]) if before is None else self._owners.get(before) or self.find(hashes[0])
        if owner:
            self._owners.update(dict.fromkeys(hashes, owner))

    def removed(self, block_hash: bytes) -> None:
        """A block has left the pool."""
        self._owners.pop(block_hash, None)

    def owner(self, block_hash: bytes) -> str:
        """The tenant that a block in the pool belongs to; empty: none, or not known."""
        return self._owners.get(block_hash, "")

    def owns(self, tenant: str, block_hash: bytes) -> bool:
        """Whether a block in the pool is known to belong to a tenant; what has no tenant is nobody's."""
        return bool(tenant) and self._owners.get(block_hash) == tenant
