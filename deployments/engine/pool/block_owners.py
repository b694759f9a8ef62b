"""Whose KV a device pool holds, and how true it is: a block's hash does not tell.

A tenant may clear its own, and what is offloaded is stored in its tenant's name and as what it is.

A sequence belongs to the tenant, by tag, whose request or promotion brought its first block, and has the fidelity of
that; so has every later block of the block before it. A block that is found without the one before it (which was
cleared while the request that computes it ran) is looked up among the running requests. Where all KV is exact and of no
tenant nothing is remembered. An entry per block of the pool at most, and `MOST_CLAIMS` beginnings. Engine thread only;
O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvmanager.segments.keys import EXACT

MOST_CLAIMS = 8192
"""Beginnings that were announced and are not in the pool yet, or any more; more than an engine admits at once."""


class Owner(NamedTuple):
    """Of a sequence."""

    tenant: str = ""
    """Tag; empty: none, or not known."""
    fidelity: str = EXACT
    """`kvmanager.segments.keys.Fidelity`, that of its names."""


NO_OWNER = Owner()


class BlockOwners:
    """See the module's docstring."""

    def __init__(self, find: Callable[[bytes], Owner] = lambda block_hash: NO_OWNER) -> None:
        """`find`: the owner of the running request that has a block; `NO_OWNER`: none has."""
        self._find = find
        self._owners: dict[bytes, str] = {}
        """By block its tenant."""
        self._lossy: dict[bytes, str] = {}
        """By block its fidelity, where that is not exact."""
        self._claims: OrderedDict[bytes, Owner] = OrderedDict()

    def claim(self, first_hash: bytes, owner: Owner) -> None:
        """A sequence that begins with this block is about to be brought or computed for an owner."""
        if owner != NO_OWNER:
            self._claims[first_hash] = owner
            self._claims.move_to_end(first_hash)
            if len(self._claims) > MOST_CLAIMS:
                self._claims.popitem(last=False)

    def stored(self, hashes: Sequence[bytes], before: bytes | None) -> None:
        """Consecutive blocks have entered the pool, after the block `before`, or as the first of a sequence."""
        if not hashes or not (self._claims or self._owners):
            return
        if before is None:
            owner = self._claims.get(hashes[0], NO_OWNER)
        else:
            owner = self.owner(before) if before in self._owners else self._find(hashes[0])
        self._owners.update(dict.fromkeys(hashes, owner.tenant))
        if owner.fidelity != EXACT:
            self._lossy.update(dict.fromkeys(hashes, owner.fidelity))

    def removed(self, block_hash: bytes) -> None:
        """A block has left the pool."""
        self._owners.pop(block_hash, None)
        self._lossy.pop(block_hash, None)

    def owner(self, block_hash: bytes) -> Owner:
        """The owner of a block in the pool; `NO_OWNER`: none, or not known."""
        return Owner(self._owners.get(block_hash, ""), self._lossy.get(block_hash, EXACT))

    def owns(self, tenant: str, block_hash: bytes) -> bool:
        """Whether a block in the pool is known to belong to a tenant; a block without a tenant belongs to none."""
        return bool(tenant) and self._owners.get(block_hash) == tenant
