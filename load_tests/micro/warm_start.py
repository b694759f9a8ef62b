"""How long until what lies in Redis is found again after a restart: `python -m load_tests.micro.warm_start`.

For each number of segments: an embedded redis-server is filled, stopped, and started again as the server does it. Timed
are its start (reading its data), the scan of all headers, and telling the index; on the real parts, without Ray and
without an engine. The server answers requests meanwhile.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from deployments.redis_endpoint import RedisEndpoint, open_store, segment_prefix
from deployments.redis_index import RedisIndex, read_index
from deployments.redis_server import EmbeddedRedis
from kvmanager.config import ManagerConfig
from kvmanager.keys import BlockHash
from kvmanager.locations import REDIS
from kvmanager.manager import KVManager
from kvmanager.segment_format import SegmentHeader, seal, sealed_bytes
from kvmanager.segments import SegmentSpan, split_segments
from kvmanager.server_secret import ServerSecret

out = Console(stderr=True, highlight=False)
FINGERPRINT = b"w" * 32
SEGMENT_BLOCKS = 8
SEGMENTS_PER_PROMPT = 10
ADOPT_CHUNK = 1000
SHAPE = (4, 2, 256, 2, 32)  # layers, K and V, tokens, KV heads, head dimension: 256 KiB of bfloat16
PATIENT_S = 60.0


def prompts(segments: int) -> Iterator[list[SegmentSpan]]:
    """The segments of random prompts."""
    rng = random.Random(0)
    for _ in range(segments // SEGMENTS_PER_PROMPT):
        hashes = [BlockHash(rng.randbytes(32)) for _ in range(SEGMENTS_PER_PROMPT * SEGMENT_BLOCKS)]
        yield split_segments(hashes, 0, len(hashes), SEGMENT_BLOCKS, len(hashes))


def sealed(span: SegmentSpan, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> memoryview:
    """The buffer, sealed as this segment."""
    seal(buffer.data, SegmentHeader.raw(span, FINGERPRINT, SHAPE, "bfloat16"))
    return buffer.data


def endpoint_of(server: EmbeddedRedis) -> RedisEndpoint:
    """How the store reaches the server."""
    prefix, secret = segment_prefix("default", FINGERPRINT), ServerSecret(bytes(32))
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
    buffer = np.zeros(sealed_bytes(SHAPE, "bfloat16"), np.uint8)
    server = EmbeddedRedis(folder, 2 * segments * buffer.nbytes)
    server.start()
    store = open_store(endpoint_of(server))
    spans = [span for prompt in prompts(segments) for span in prompt]
    for span in track(spans, f"{segments} segments", console=out):
        store.put(span.key, sealed(span, buffer))
    server.stop()
    began = time.monotonic()
    server.start()
    try:
        _wait_until_read(server)
        started = time.monotonic()
        scan_s, adopt_s, found = index(endpoint_of(server))
    finally:
        server.stop()
    assert len(found.headers) == len(spans)
    return {
        "segments": segments,
        "bytes": segments * buffer.nbytes,
        "redis_start_s": started - began,
        "scan_s": scan_s,
        "index_s": adopt_s,
    }


def _wait_until_read(server: EmbeddedRedis) -> None:
    import redis

    client = redis.Redis.from_url(server.url)
    end = time.monotonic() + PATIENT_S
    while time.monotonic() < end:
        try:
            if client.ping():
                return
        except redis.RedisError:
            time.sleep(0.01)
    raise TimeoutError(f"Redis has not read its data within {PATIENT_S} s")


def main(
    segments: Annotated[list[int] | None, typer.Option(help="How many segments; may be repeated.")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")] = None,
) -> None:
    """Print a table; needs room on disk and in memory for the segments."""
    rows = []
    for number in segments or [100, 1000, 4000]:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(number, Path(folder)))
    table = Table("segments", "MiB", "redis-server reads its data", "scan of the headers", "index")
    for row in rows:
        times = [f"{row[name]:.2f} s" for name in ("redis_start_s", "scan_s", "index_s")]
        table.add_row(f"{row['segments']:.0f}", f"{row['bytes'] / 1024**2:.0f}", *times)
    out.print(table)
    if json_file:
        report = json.dumps(rows, indent=2)
        print(report) if json_file == "-" else Path(json_file).write_text(report)


if __name__ == "__main__":
    typer.run(main)
