"""This deployment's access to its Redis: the embedded server, or the claim on an external one; a checked connection.

The blocking half of the Redis tier. `close` may be called while another thread is in any method.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import uuid
from pathlib import Path

import redis

from deployments.redis_tier.config import RedisTierConfig
from deployments.redis_tier.entries import Neighbours, namespace_root, owner_key
from deployments.redis_tier.server import EmbeddedRedis
from deployments.segment_store.redis_connection import (
    RedisLoadingError,
    RedisUnavailableError,
    ServerFacts,
    check,
    connect,
    explain,
    read_facts,
)

SCAN_DEADLINE_S = 2.0
"""Least timeout for answers that no request waits for."""
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
    """The claim on a namespace of a Redis: at most one deployment manages one model's segments there.

    The claim is a key that ends by itself, with the claimant's name as value. SET NX cannot take what is held, and
    PEXPIRE never changes whose it is, so that prolonging another's by mistake does no harm.

    Serve kills the actor that holds a claim, so a server that is restarted finds its own from before. Where the name
    says that its process ran under this kernel, among the processes that are seen here, and it runs no more, the claim
    is taken at once: until it ended by itself nothing in Redis would be reused.

    Every method is a few commands of Redis, blocks, and raises redis.RedisError.
    """

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


class RedisAccess:
    """`open`, then `claim`, then `probe` again and again; after any failure from `open` on again."""

    def __init__(self, config: RedisTierConfig) -> None:
        self._config = config
        self._server = EmbeddedRedis(Path(config.folder), config.budget_bytes) if config.embedded else None
        self._claimant = claimant_name()
        self._lock = threading.Lock()
        self._closed = False
        self._client: redis.Redis | None = None
        self._claim: NamespaceClaim | None = None
        self._neighbours: Neighbours | None = None

    @property
    def url(self) -> str:
        """Where Redis is; for the embedded server known once it was started."""
        return self._server.url if self._server is not None else self._config.url

    @property
    def server_ended(self) -> bool:
        """Whether there is an embedded server that takes no connections."""
        return self._server is not None and not self._server.listening

    def open(self) -> ServerFacts:
        """Start the embedded server if it does not run, connect, check. Raises RedisUnavailableError."""
        with self._lock:
            if self._closed:
                raise RedisUnavailableError("the Redis tier has ended")
            if self._client is not None:
                self._client.close()
            if self._server is not None:
                self._server.start()
            self._client = client = connect(self.url, self._config.deadline_s)
            was_loading = self._server is not None and self._server.loading
        try:
            return check(client, self.url, namespace_root(self._config.namespace))
        except RedisUnavailableError as error:
            if isinstance(error, RedisLoadingError) or not was_loading:
                raise
            # It was too busy to say so itself, and may have come to its end since.
            raise RedisLoadingError("the embedded Redis is loading its data") from error

    def claim(self, fingerprint: bytes) -> None:
        """Claim the model's segments in an external Redis. Raises RedisUnavailableError, also when they are another's.

        An embedded Redis is claimed by the lock on its folder.
        """
        assert self._client is not None
        if self._server is None:
            self._claim = NamespaceClaim(self._client, owner_key(self._config.namespace, fingerprint), self._claimant)
            try:
                self._renew_claim()
            except redis.RedisError as error:
                raise RedisUnavailableError(self.explain(error)) from error

    def look_at_neighbours(self, prefix: bytes) -> int:
        """List what other models have in an embedded Redis, and delete entries of no model; return their number.

        Raises RedisUnavailableError.
        """
        if self._server is None or self._client is None:
            return 0
        client = connect(self.url, max(SCAN_DEADLINE_S, self._config.deadline_s))
        self._neighbours = Neighbours(client, prefix, self._config.budget_bytes)
        try:
            return self._neighbours.survey()
        except redis.RedisError as error:
            raise RedisUnavailableError(self.explain(error)) from error

    @property
    def neighbour_segments(self) -> int:
        """Return the known number of segments of other models in an embedded Redis."""
        return self._neighbours.segments if self._neighbours is not None else 0

    def make_room(self, facts: ServerFacts) -> int:
        """Let other models' segments leave an embedded Redis that is nearly full. Raises redis.RedisError."""
        return 0 if self._neighbours is None else self._neighbours.make_room(facts.used_memory_bytes)

    def probe(self) -> ServerFacts:
        """Ask for a sign of life and renew the claim.

        Raises redis.RedisError for a failure that may pass, RedisUnavailableError when the claim is lost.
        """
        assert self._client is not None
        facts = read_facts(self._client)
        if self._claim is not None:
            self._renew_claim()
        return facts

    def explain(self, error: redis.RedisError) -> str:
        """One sentence for /health."""
        return explain(self.url, error)

    def close(self) -> None:
        """Give the claim up, close the connections, stop the embedded server. What is stored stays."""
        with self._lock:
            self._closed = True
            if self._claim is not None:
                with contextlib.suppress(redis.RedisError):
                    self._claim.release()
            if self._client is not None:
                self._client.close()
            if self._server is not None:
                self._server.stop()

    def _renew_claim(self) -> None:
        assert self._claim is not None
        holder = self._claim.take()
        if holder is not None:
            raise RedisUnavailableError(
                f"namespace {self._config.namespace!r} of this Redis is used by another crosskv server "
                f"({_shown(holder.rpartition(', ')[0])}): set kv.redis_namespace to another name"
            )


def _shown(holder: str) -> str:
    """What anybody may have written into Redis, as it may stand in a log and in /health."""
    return "".join(letter if letter.isprintable() else "?" for letter in holder[:100])
