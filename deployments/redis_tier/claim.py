"""The claim on a namespace of a Redis: at most one deployment manages one model's segments there.

The claim is a key that ends by itself, with the claimant's name as value. It needs no script: SET NX cannot take what
is held, and PEXPIRE never changes whose it is, so that prolonging another's by mistake does no harm.
"""

from __future__ import annotations

import redis

CLAIM_MS = 10_000


class NamespaceClaim:
    """One claim. Every method is a few commands of Redis, blocks, and raises redis.RedisError."""

    def __init__(self, client: redis.Redis, key: bytes, claimant: str) -> None:
        self._client = client
        self._key = key
        self._claimant = claimant.encode()

    def take(self) -> str | None:
        """Claim it or renew the claim; None when it is ours now, else the name of whose it is."""
        holder = self._holder()  # first, because a full Redis takes no SET
        if holder is None:
            if self._client.set(self._key, self._claimant, nx=True, px=CLAIM_MS):
                return None
            holder = self._holder()
        if holder == self._claimant:  # a claim of somebody else is not prolonged: it may be of one who has ended
            self._client.pexpire(self._key, CLAIM_MS)
            holder = self._holder()
        return None if holder == self._claimant else (holder or b"unknown").decode(errors="replace")

    def release(self) -> None:
        """Give up the claim, if it is ours. Renewed first, so that it cannot become another's in between."""
        if self.take() is None:
            self._client.unlink(self._key)

    def _holder(self) -> bytes | None:
        holder: bytes | None = self._client.get(self._key)  # type: ignore[assignment]
        return holder
