"""Chunks that wait to be filled: bounded, and fair between tenants.

Tenants take turns, so one that loops over prompts with new chunks does not delay another tenant's first chunk. Where
there is no room, the oldest chunk of the tenant goes that has the most chunks, or the most tokens, of what is too many.
No clock, one thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_CHUNKS = 256
MOST_TOKENS = 1 << 19
"""About 20 MB of token ids."""


@dataclass(frozen=True, slots=True)
class ColdChunk:
    """A chunk to be computed alone, as an exact prompt of its tenant."""

    token_ids: Sequence[int]
    block_hashes: list[bytes]
    cache_salt: str
    tenant: str

    @property
    def key(self) -> bytes:
        """Its name: equal for equal tokens of one tenant only, for the salt is in it."""
        return self.block_hashes[-1]

    @property
    def fill_id(self) -> str:
        """What the request ids begin with under which it is computed."""
        return f"fill-{self.key[:16].hex()}-"


class FillQueue:
    """See the module's docstring."""

    def __init__(self, most_chunks: int = MOST_CHUNKS, most_tokens: int = MOST_TOKENS) -> None:
        self._most_chunks = most_chunks
        self._most_tokens = most_tokens
        self._of: OrderedDict[str, deque[ColdChunk]] = OrderedDict()
        """By tenant, whose turn is next first."""
        self._tokens: dict[str, int] = {}
        self._keys: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, chunk: ColdChunk, first: bool = False) -> list[ColdChunk]:
        """Let a chunk wait, unless it does; `first`: as its tenant's next. Returns the chunks that went for it."""
        if chunk.key in self._keys:
            return []
        chunks = self._of.setdefault(chunk.tenant, deque())
        if first:
            chunks.appendleft(chunk)
        else:
            chunks.append(chunk)
        self._keys.add(chunk.key)
        self._tokens[chunk.tenant] = self._tokens.get(chunk.tenant, 0) + len(chunk.token_ids)
        dropped: list[ColdChunk] = []
        while (too_many := len(self._keys) > self._most_chunks) or sum(self._tokens.values()) > self._most_tokens:
            most = max(self._of, key=lambda tenant: len(self._of[tenant]) if too_many else self._tokens[tenant])
            dropped.append(self._take_from(most))
        return dropped

    def take(self) -> ColdChunk | None:
        """The oldest chunk of the tenant whose turn it is; None: nothing waits."""
        tenant = next(iter(self._of), None)
        if tenant is None:
            return None
        chunk = self._take_from(tenant)
        if tenant in self._of:
            self._of.move_to_end(tenant)
        return chunk

    def remove(self, key: bytes) -> None:
        """A chunk is no longer wanted; one that does not wait is no error. O(chunks)."""
        for tenant, chunks in self._of.items() if key in self._keys else ():
            place = next((place for place, chunk in enumerate(chunks) if chunk.key == key), None)
            if place is not None:
                chunks.rotate(-place)
                self._take_from(tenant)
                if tenant in self._of:
                    chunks.rotate(place)
                return

    def _take_from(self, tenant: str) -> ColdChunk:
        chunks = self._of[tenant]
        chunk = chunks.popleft()
        self._keys.discard(chunk.key)
        self._tokens[tenant] -= len(chunk.token_ids)
        if not chunks:
            del self._of[tenant], self._tokens[tenant]
        return chunk
