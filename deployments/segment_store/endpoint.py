"""Everything that a process needs to reach one model's segments in Redis, and the store made of it.

The endpoint travels from the Redis tier over the manager and the CPU tiers to the prefetch workers.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from deployments.segment_store.base import OwnBuffer, SegmentStore, StoredHeader
from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.coded_store import CodedStore
from deployments.segment_store.redis_profiles import RedisProfiles
from deployments.segment_store.redis_store import RedisStore
from deployments.segment_store.segment_codecs import RAW_CODING, Coding, SegmentCodecs
from deployments.segment_store.stored_form import stored_form
from kvmanager.segments.format import Buffer, SegmentMismatch
from kvmanager.segments.guard import SALT_BYTES, ContentTag, SegmentGuard
from kvmanager.segments.server_secret import ServerSecret


@dataclass(frozen=True, slots=True)
class RedisEndpoint:
    """Where one model's segments lie. `expire_s` 0: they do not expire by themselves."""

    url: str = field(repr=False)  # it holds the password
    prefix: bytes
    fingerprint: bytes
    deadline_s: float
    expire_s: int
    secret: ServerSecret
    encrypt: bool = False
    """Whether what is stored from now on is encrypted."""
    coding: Coding = RAW_CODING

    @property
    def profile_prefix(self) -> bytes:
        """What the names of codec profiles begin with: the namespace's, for its models may share one."""
        root, _, _ = self.prefix.rsplit(b":", 2)
        return root + b":profile:"

    def transport(self) -> SegmentStore:
        """What brings segments to Redis and back; connects at the first call. Raises RedisUnavailableError."""
        return RedisStore(self.url, self.prefix, self.deadline_s, self.expire_s)


def open_store(endpoint: RedisEndpoint) -> CheckedStore:
    """The layers, put together; connects at the first call. Raises RedisUnavailableError for a URL that is none."""
    guard = SegmentGuard(endpoint.secret, encrypts=endpoint.encrypt)
    return CheckedStore(GuardedStore(endpoint.transport(), guard, secrets.token_bytes), endpoint.fingerprint)


def open_profiles(endpoint: RedisEndpoint) -> RedisProfiles:
    """Open the codec profiles next to the segments; connect at the first call. Raises RedisUnavailableError."""
    tags = ContentTag(endpoint.secret)
    return RedisProfiles(endpoint.url, endpoint.profile_prefix, endpoint.deadline_s, endpoint.expire_s, tags)


def open_coded_store(endpoint: RedisEndpoint, meter: CodecMeter) -> CodedStore:
    """What holds raw segments for those outside. Imports what coding needs. Raises RedisUnavailableError."""
    profiles = open_profiles(endpoint)
    codecs = SegmentCodecs(endpoint.coding, profiles)
    codecs.warm_up()
    form = stored_form(endpoint.coding, endpoint.fingerprint)
    return CodedStore(open_store(endpoint), endpoint.fingerprint, codecs, profiles, meter, form)


# The layer of the segment store that keeps out what was not stored under the server's secret.
#
# What comes from below is bytes that anybody may have written: nothing above this layer sees them before their keyed
# checksum is verified (`kvmanager.segments.guard`). Any thread.


class GuardedStore:
    """Any `SegmentStore`, guarded. `draw(n)` returns n random bytes."""

    def __init__(self, inner: SegmentStore, guard: SegmentGuard, draw: Callable[[int], bytes]) -> None:
        self._inner = inner
        self._guard = guard
        self._draw = draw

    def get(self, key: bytes) -> OwnBuffer | None:
        """The segment, opened. Raises SegmentMismatch too."""
        guarded = self._inner.get(key)
        return None if guarded is None else self._guard.open(guarded)

    def put(self, key: bytes, header: Buffer, body: Buffer) -> None:
        """See `SegmentStore.put`."""
        self._inner.put(key, *self._guard.guard(header, body, self._draw(SALT_BYTES)))

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `SegmentStore.delete`."""
        return self._inner.delete(keys)

    def headers(self) -> Iterator[list[StoredHeader]]:
        """See `SegmentStore.headers`; the head of an entry that is refused is empty."""
        for entries in self._inner.headers():
            yield [entry._replace(head=self._opened(entry.head)) for entry in entries]

    def _opened(self, head: bytes) -> bytes:
        try:
            return bytes(self._guard.open_header(head))
        except SegmentMismatch:
            return b""
