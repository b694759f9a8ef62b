"""Connecting to a Redis, and saying in one sentence why it cannot be used.

`RedisUnavailableError`'s text is what /health shows: it names what is wrong and what to do, and never a password.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

SCHEMES = ("redis", "rediss", "unix")
READ_BYTES = 1 << 18
"""What one recv asks for: of 32 KiB (redis-py's own, 1.3 GB/s) to 4 MiB the fastest for segments (2.4 GB/s)."""

SCAN_COUNT = 1000
"""Names that one SCAN looks at."""

_KEPT_ALIVE: dict[str, Any] = {
    "socket_keepalive": True,
    # Firewalls and balancers forget idle connections after some minutes, the shortest after one.
    "socket_keepalive_options": {
        getattr(socket, name): value
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    },
}

NEEDED_COMMANDS = (
    "ping",
    "info",
    "get",
    "set",
    "hlen",
    "hmget",
    "hset",
    "hstrlen",
    "eval",
    "scan",
    "unlink",
    "pexpire",
)
ACL_RIGHTS = "~crosskv:* " + " ".join(f"+{command}" for command in NEEDED_COMMANDS)
"""What an ACL user needs, as `ACL SETUSER` takes it (and +select for a database other than 0)."""


class RedisUnavailableError(Exception):
    """Redis cannot be used now. `str()` is one sentence that says what to do."""


class RedisLoadingError(RedisUnavailableError):
    """It will be usable by itself, soon."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What INFO says of a server. `run_id` changes when the server was restarted or another one took its place."""

    run_id: str
    version: str
    used_memory_bytes: int
    maxmemory_bytes: int
    evicted_keys: int
    clients: int


def connect(url: str, deadline_s: float) -> redis.Redis:
    """A client that connects at its first command; thread-safe.

    No answer is waited for longer than `deadline_s` (a large value: each piece of it), and what was not answered then
    is not tried again. A connection that was dropped, as firewalls and servers do with idle ones, is opened once more:
    every command here may be repeated. TCP probes keep idle connections known to whatever lies between.
    RESP2, so that an ACL user needs no +hello and the handshake no round trips. Raises RedisUnavailableError for a URL
    that is none.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError:  # brackets that hold no address
        scheme = ""
    if scheme not in SCHEMES:
        raise RedisUnavailableError(
            "kv.redis_url: not the URL of a Redis; it starts with redis://, rediss:// or unix://, such as "
            "redis://host:6379/0, or is 'embedded'"
        )
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=deadline_s,
            socket_connect_timeout=deadline_s,
            socket_read_size=READ_BYTES,
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,)),
            **(_KEPT_ALIVE if scheme != "unix" else {}),
            protocol=2,
            driver_info=None,
        )
    except ValueError:  # its text may quote the password
        raise RedisUnavailableError(
            "kv.redis_url: it cannot be read; write redis://user:password@host:port/0, "
            "with special characters of the password percent-encoded"
        ) from None


def server_name(url: str) -> str:
    """The URL's place without user and password, for messages."""
    parts = urlsplit(url)
    place = parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{place}"


def explain(url: str, error: redis.RedisError) -> str:
    """One sentence for an error of redis-py."""
    name, text = server_name(url), " ".join(str(error).split())
    if isinstance(error, redis.exceptions.BusyLoadingError):
        return f"the Redis at {name} is loading its data"
    if isinstance(error, redis.exceptions.AuthenticationError):
        return f"the Redis at {name} refuses the user or password: set them in kv.redis_url ({text})"
    if isinstance(error, redis.exceptions.NoPermissionError):
        return f"the Redis at {name} forbids a command that crosskv needs ({text}): give its user {ACL_RIGHTS}"
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return f"the Redis at {name} is a read-only replica: set kv.redis_url to the primary"
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return f"the Redis at {name} is full and takes no writes: raise its maxmemory, or set kv.redis_bytes below it"
    if text.startswith("NOREPLICAS"):
        return f"the Redis at {name} takes no writes: it has fewer replicas than its min-replicas-to-write"
    if text.startswith("MISCONF"):
        return f"the Redis at {name} takes no writes: it cannot save to its disk (stop-writes-on-bgsave-error)"
    if isinstance(error, redis.exceptions.TimeoutError):
        return f"the Redis at {name} does not answer in time: check it, or raise kv.load_deadline_s"
    if isinstance(error, redis.exceptions.ConnectionError):
        return f"no Redis can be reached at {name}: start it, or correct kv.redis_url ({text})"
    return f"the Redis at {name} answers an error: {text}"


def require_writes(client: redis.Redis, url: str, prefix: bytes) -> None:
    """Raise RedisUnavailableError, in one sentence, for a Redis that answers and keeps nothing: full, or short of
    replicas or of disk. A running server goes on reading from it."""
    try:
        client.set(prefix + b"probe", b"0", ex=10)
        client.unlink(prefix + b"probe")
    except redis.RedisError as error:
        raise RedisUnavailableError(explain(url, error)) from error


def read_facts(client: redis.Redis) -> ServerFacts:
    """One INFO. Raises redis.RedisError."""
    info: dict[str, Any] = client.info()
    return ServerFacts(
        run_id=str(info.get("run_id", "")),
        version=_version_name(info),
        used_memory_bytes=int(info.get("used_memory", 0)),
        maxmemory_bytes=int(info.get("maxmemory", 0)),
        evicted_keys=int(info.get("evicted_keys", 0)),
        clients=int(info.get("connected_clients", 0)),
    )


def check(client: redis.Redis, url: str, prefix: bytes) -> ServerFacts:
    """Try everything that the tier will need, on a key of its own below `prefix`'s namespace.

    Raises RedisUnavailableError when this Redis cannot be used: not reachable, not allowed,
    too old, a cluster, loading.
    """
    try:
        info: dict[str, Any] = client.info()
        if info.get("loading"):
            percent = float(info.get("loading_loaded_perc", 0))
            raise RedisLoadingError(f"the Redis at {server_name(url)} is loading its data ({percent:.0f} %)")
        if info.get("cluster_enabled"):
            raise RedisUnavailableError(
                f"the Redis at {server_name(url)} runs in cluster mode, which is not supported: "
                "set kv.redis_url to a single Redis or Valkey"
            )
        if "valkey_version" not in info and _major(info) < 6:
            raise RedisUnavailableError(
                f"the Redis at {server_name(url)} is version {info.get('redis_version')}; crosskv needs 6 or newer"
            )
        client.ping()
        _try_commands(client, prefix + b"probe")
        return read_facts(client)
    except redis.RedisError as error:
        raise RedisUnavailableError(explain(url, error)) from error


def _try_commands(client: redis.Redis, key: bytes) -> None:
    """Raises redis.RedisError for the first command that is refused; a full Redis is no reason."""
    pipeline = client.pipeline(transaction=False)
    pipeline.set(key, b"0", ex=10)
    pipeline.get(key)
    pipeline.unlink(key)
    pipeline.hset(key, "0", "0")
    pipeline.pexpire(key, 10)
    pipeline.hlen(key)
    pipeline.hmget(key, ["0"])
    pipeline.hstrlen(key, "0")
    pipeline.eval("return 0", 1, key)
    pipeline.scan(0, match=key, count=1)
    pipeline.unlink(key)
    for answer in pipeline.execute(raise_on_error=False):
        if isinstance(answer, redis.exceptions.NoPermissionError | redis.exceptions.ReadOnlyError):
            raise answer


def _major(info: dict[str, Any]) -> int:
    return int(str(info.get("redis_version", "0")).split(".")[0])


def _version_name(info: dict[str, Any]) -> str:
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', 'unknown')}"
