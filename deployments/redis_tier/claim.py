"""The claim on a namespace of a Redis: at most one deployment manages one model's segments there.

The claim is a key that ends by itself, with the claimant's name as value. SET NX cannot take what is held, and PEXPIRE
never changes whose it is, so that prolonging another's by mistake does no harm.

Serve kills the actor that holds a claim, so a server that is restarted finds its own from before. Where the name says
that its process ran under this kernel, among the processes that are seen here, and it runs no more, the claim is taken
at once: until it ended by itself nothing in Redis would be reused.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from pathlib import Path

import redis

CLAIM_MS = 10_000
_TAKE_OVER = """
if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""
_NAME = re.compile(r"host .*, process (\d+), (.+)\.[0-9a-f]{32}", re.DOTALL)


def claimant_name() -> str:
    """Name this process; what follows the last comma is for programs."""
    return f"host {socket.gethostname()}, process {os.getpid()}, {_processes_here()}.{uuid.uuid4().hex}"


def has_ended(claimant: str) -> bool:
    """Whether a name is of a process that would be seen here, and is not."""
    found, here = _NAME.fullmatch(claimant), _processes_here()
    if found is None or not here or found[2] != here:
        return False
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _processes_here() -> str:
    """What tells this kernel's processes, as they are seen here, from those of any other; empty where it is not known.

    Containers may share a host's name, and count processes of their own.
    """
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{booted} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


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
        if holder is not None and holder != self._claimant and has_ended(holder.decode(errors="replace")):
            self._client.eval(_TAKE_OVER, 1, self._key, holder, self._claimant, CLAIM_MS)
            holder = self._holder()
        if holder == self._claimant:  # another server's claim is not prolonged: that server may have ended
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
