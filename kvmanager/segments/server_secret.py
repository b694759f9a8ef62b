"""The server's secret: what keeps a stranger from naming, confirming or forging anything by knowing how names are made.

Tenants' tags, the salts of all prompts and the checksums of segments in Redis are keyed with it, each with a key of its
own: learning one of these keys reveals none of the others. A server with another secret finds nothing of what this
one has stored: that is a cold cache, never an error. Pure: any thread. Nothing here prints what it holds.
"""

import hashlib
import hmac
from typing import Final

SECRET_BYTES: Final = 32


class ServerSecret:
    """`SECRET_BYTES` random bytes. Compared in constant time; `str` and `repr` do not show them. Raises ValueError."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if len(value) != SECRET_BYTES:
            raise ValueError(f"a server secret is {SECRET_BYTES} bytes, got {len(value)}")
        self._value = bytes(value)

    def key_for(self, purpose: bytes) -> bytes:
        """Return the 32-byte key for one purpose: HKDF-SHA256 (RFC 5869), one block, the purpose as its info."""
        extracted = hmac.digest(b"crosskv-server-secret", self._value, hashlib.sha256)
        return hmac.digest(extracted, purpose + b"\x01", hashlib.sha256)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ServerSecret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self.key_for(b"hash"))

    def __repr__(self) -> str:
        return "ServerSecret(***)"
