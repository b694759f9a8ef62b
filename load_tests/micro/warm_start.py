"""How long until what lies in Redis is found again after a restart: `python -m load_tests.micro.warm_start`.

For each number of segments: an embedded redis-server is filled, stopped, and started again as the server does it. Timed
are its start (reading its data), the scan of all headers, and telling the index; on the real parts, without Ray and
without an engine. The server answers requests meanwhile.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import redis
import typer
from rich.progress import track

from deployments.redis_tier.actor import RedisIndex, read_index
from deployments.redis_tier.server import EmbeddedRedis
from deployments.segment_store.endpoint import RedisEndpoint, open_store
from deployments.segment_store.key_names import segment_prefix
from kvmanager.config import ManagerConfig
from kvmanager.index.locations import REDIS
from kvmanager.manager import KVManager
from kvmanager.segments.format import SegmentHeader, seal, sealed_bytes
from kvmanager.segments.spans import SegmentSpan
from load_tests.harness.engine import SECRET
from load_tests.harness.memory_port import made_up_hashes
from load_tests.harness.patience import until
from load_tests.harness.tiers import MIB
from load_tests.measuring import report
from load_tests.measuring.program import JsonFile, out
from load_tests.micro.index_scale import SEGMENT_BLOCKS, prompts

FINGERPRINT = b"w" * 32
SEGMENTS_PER_PROMPT = 10
ADOPT_CHUNK = 1000
SHAPE = (4, 2, 256, 2, 32)  # layers, K and V, tokens, KV heads, head dimension: 256 KiB of bfloat16
PATIENT_S = 60.0
COLUMNS = {
    "segments": "{0[segments]:.0f}",
    "MiB": "{0[mib]:.0f}",
    "redis-server reads its data": "{0[redis_start_s]:.2f} s",
    "scan of the headers": "{0[scan_s]:.2f} s",
    "index": "{0[index_s]:.2f} s",
}


def sealed(span: SegmentSpan, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> memoryview:
    """The buffer, sealed as this segment."""
    seal(buffer.data, SegmentHeader.raw(span, made_up_hashes(span), FINGERPRINT, SHAPE, "bfloat16"))
    return buffer.data


def endpoint_of(server: EmbeddedRedis) -> RedisEndpoint:
    """How the store reaches the server."""
    prefix, secret = segment_prefix("default", FINGERPRINT), SECRET
    return RedisEndpoint(server.url, prefix, FINGERPRINT, PATIENT_S, 0, secret)


def index(endpoint: RedisEndpoint) -> tuple[float, float, RedisIndex]:
    """Seconds of scanning and of telling the manager's brain, and what was found. Waits for Redis to have read."""
    began = time.monotonic()
    found = read_index(endpoint)
    scanned = time.monotonic()
    brain = KVManager(ManagerConfig(blocks_per_segment=SEGMENT_BLOCKS), epoch=1)
    brain.set_budget(REDIS, 1 << 50)
    for start in range(0, len(found.headers), ADOPT_CHUNK):
        chunk = found.headers[start : start + ADOPT_CHUNK]
        sizes = ([header.sealed_bytes for header in chunk], [header.raw_sealed_bytes for header in chunk])
        brain.adopt(0.0, REDIS, [header.span for header in chunk], *sizes)
    return scanned - began, time.monotonic() - scanned, found


def measure(segments: int, folder: Path) -> dict[str, float]:
    """Fill, stop, start, index."""
    buffer = np.zeros(sealed_bytes(SHAPE, "bfloat16", SEGMENT_BLOCKS), np.uint8)
    server = EmbeddedRedis(folder, 2 * segments * buffer.nbytes)
    server.start()
    store = open_store(endpoint_of(server))
    spans = [span for _, prompt in prompts(0, segments, SEGMENTS_PER_PROMPT) for span in prompt]
    for span in track(spans, f"{segments} segments", console=out):
        store.put(span.key, sealed(span, buffer))
    server.stop()
    began = time.monotonic()
    server.start()
    try:
        client = redis.Redis.from_url(server.url)
        until(lambda: _answers(client), "Redis has read its data")
        started = time.monotonic()
        scan_s, adopt_s, found = index(endpoint_of(server))
    finally:
        server.stop()
    assert len(found.headers) == len(spans)
    return {
        "segments": segments,
        "bytes": segments * buffer.nbytes,
        "mib": segments * buffer.nbytes / MIB,
        "redis_start_s": started - began,
        "scan_s": scan_s,
        "index_s": adopt_s,
    }


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def main(
    segments: Annotated[list[int] | None, typer.Option(help="How many segments; may be repeated.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Print a table; needs room on disk and in memory for the segments."""
    rows = []
    for number in segments or [100, 1000, 4000]:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(number, Path(folder)))
    report.deliver(report.rows(COLUMNS, rows), rows, json_file)


if __name__ == "__main__":
    typer.run(main)
