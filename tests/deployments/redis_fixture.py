"""A real redis-server for tests, and sealed segments to put into it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import redis

from deployments.redis_tier.entries import segment_prefix
from deployments.redis_tier.server import EmbeddedRedis
from deployments.segment_store.endpoint import RedisEndpoint
from deployments.segment_store.redis_connection import connect
from deployments.segment_store.redis_store import PART_BYTES
from kvmanager.segments.format import HEADER_BYTES, SegmentHeader, SegmentMismatch, seal, stated_head_bytes
from kvmanager.segments.guard import SegmentGuard
from kvmanager.segments.server_secret import ServerSecret
from kvmanager.segments.spans import SegmentSpan, split_segments
from load_tests.harness.memory_port import made_up_hashes
from load_tests.harness.patience import patience

FINGERPRINT = b"F" * 32
SECRET = ServerSecret(b"the server's secret of 32 bytes.")
SALT = b"sixteen bytes of"
OTHER_FINGERPRINT = b"G" * 32
SEGMENT_BLOCKS = 4
SHAPE = (2, 2, SEGMENT_BLOCKS * 32, 2, 8)
"""16 KB of float16 in a segment of 4 blocks."""
LARGE_SHAPE = (10, 2, SEGMENT_BLOCKS * 32, 8, 256)
"""10 MiB: two whole parts and a half."""
PATIENCE_S = 60.0
MIB = 1 << 20


class RedisForTests:
    """An embedded server in a folder, and a client that may do everything in it."""

    def __init__(self, folder: Path, budget_bytes: int = 64 * MIB) -> None:
        self.server = EmbeddedRedis(folder, budget_bytes)
        self.start()

    def start(self) -> None:
        self.server.start()
        self.url = self.server.url
        self.client = connect(self.url, 10.0)
        until(self._answers, "Redis has read its data")

    def restart(self) -> None:
        self.stop()
        self.start()

    def stop(self) -> None:
        self.client.close()
        self.server.stop()

    def empty(self) -> None:
        """No data, no users but the default one, no connections of earlier tests, and no memory that is still theirs.

        A connection over which large values came keeps a buffer of 4 MiB until Redis notices that it is idle.
        """
        self.client.flushall()
        self.client.client_kill_filter(_type="normal", skipme=True)
        until(lambda: not self.client.info("memory")["lazyfree_pending_objects"], "what was deleted is freed")
        for user in self.client.acl_users():
            if user != "default":
                self.client.acl_deluser(user)

    def user_url(self, user: str, password: str) -> str:
        return f"unix://{user}:{password}@{self.url.rpartition('@')[2]}"

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.exceptions.BusyLoadingError:
            return False


def endpoint(url: str, **changes: Any) -> RedisEndpoint:
    """Of the model FINGERPRINT in the namespace "tests"."""
    fingerprint = changes.pop("fingerprint", FINGERPRINT)
    prefix = segment_prefix(changes.pop("namespace", "tests"), fingerprint)
    made: dict[str, Any] = {"deadline_s": 5.0, "expire_s": 1000, "secret": SECRET, **changes}
    return RedisEndpoint(url=url, prefix=prefix, fingerprint=fingerprint, **made)


def redis_name(key: bytes, **changes: Any) -> bytes:
    """What a segment is called in Redis."""
    return endpoint("", **changes).prefix + key.hex().encode()


def chain(seed: int, segments: int) -> list[SegmentSpan]:
    """The segments of one prompt, parents first."""
    draw = random.Random(seed)
    hashes = [draw.randbytes(32) for _ in range(segments * SEGMENT_BLOCKS)]
    return split_segments(hashes, 0, len(hashes), SEGMENT_BLOCKS, len(hashes))  # type: ignore[arg-type]


def sealed(
    span: SegmentSpan, fingerprint: bytes = FINGERPRINT, shape: tuple[int, int, int, int, int] = SHAPE
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A segment as it is stored, with a payload of its own."""
    header = SegmentHeader.raw(span, made_up_hashes(span), fingerprint, shape, "float16")
    content = np.random.default_rng(int.from_bytes(span.key))
    buffer = content.integers(0, 256, header.sealed_bytes, np.uint8)
    seal(buffer.data, header)
    return buffer


def guarded(whole: bytes, secret: ServerSecret = SECRET) -> bytes:
    """A segment as it goes to Redis."""
    return b"".join(SegmentGuard(secret).guard(*_head_and_body(whole), SALT))


def _head_and_body(whole: bytes) -> tuple[bytes, bytes]:
    try:
        head = stated_head_bytes(whole)
    except SegmentMismatch:
        head = HEADER_BYTES
    return whole[:head], whole[head:]


def fields_of(whole: bytes) -> dict[str, bytes]:
    """A segment as it lies in its hash, from the head on; of any bytes, however short."""
    head, body = _head_and_body(whole)
    parts = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
    return {"h": head, **{str(number): part for number, part in enumerate(parts)}}


def fill(client: redis.Redis, spans: Sequence[SegmentSpan], **changes: Any) -> None:
    """Put segments into Redis beside the store under test."""
    pipeline = client.pipeline(transaction=False)
    for span in spans:
        whole = guarded(sealed(span, changes.get("fingerprint", FINGERPRINT)).tobytes())
        pipeline.hset(redis_name(span.key, **changes), mapping=fields_of(whole))
    pipeline.execute()


def until(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + patience(PATIENCE_S)
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.02)
