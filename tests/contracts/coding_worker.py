"""A prefetch worker in a plain process, over a store in memory: it starts, writes a segment of each fidelity, reads it.

Prints, after each step, which of the modules named as arguments it has loaded. `test_light_processes.py` runs it.
"""

from __future__ import annotations

import json
import sys
from unittest.mock import patch

import numpy as np
from memory_store import CODING, MemoryProfiles, MemoryStore
from redis_fixture import FINGERPRINT, SHAPE, chain, endpoint

from deployments.cpu_tier.prefetch_worker import PrefetchWorker
from deployments.segment_store import endpoint as endpoints
from kernels.dtypes import bits_of
from kvmanager.segments.format import SegmentHeader, read_header, seal
from kvmanager.segments.spans import SegmentSpan
from load_tests.harness.memory_port import made_up_hashes

SEGMENTS = {"exact": "lossless", "tolerant": "cachegen"}
"""By fidelity: the codec."""


def bfloat16_segment(span: SegmentSpan, fidelity: str) -> np.ndarray:
    """Normally distributed values."""
    header = SegmentHeader.raw(span, made_up_hashes(span), FINGERPRINT, SHAPE, "bfloat16", fidelity)
    values = np.random.default_rng(1).standard_normal(SHAPE, np.float32)
    segment = np.zeros(header.sealed_bytes, np.uint8)
    segment[header.body_offset :] = (bits_of(values) >> 16).astype(np.uint16).view(np.uint8)
    seal(segment.data, header)
    return segment


def main(names: list[str]) -> None:
    """One line of JSON: {step: modules}."""
    store, loaded = MemoryStore(), {}

    def note(step: str) -> None:
        loaded[step] = [name for name in names if name in sys.modules]

    with (
        patch.object(endpoints.RedisEndpoint, "transport", lambda self: store),
        patch.object(endpoints, "open_profiles", lambda where: MemoryProfiles()),
    ):
        worker = PrefetchWorker(endpoint("", coding=CODING))
    note("start")
    for span, (fidelity, codec) in zip(chain(1, 2), SEGMENTS.items(), strict=True):
        segment = bfloat16_segment(span, fidelity)
        (stored,), reason, _ = worker.write([span.key], segment)
        found = worker.read(span.key)
        assert reason == ""
        assert stored < segment.nbytes
        assert read_header(found.data).fidelity == fidelity
        assert np.array_equal(found, segment) == (fidelity == "exact")
        assert codec in worker.codec_report()
        note(codec)
    print(json.dumps(loaded))


if __name__ == "__main__":
    main(sys.argv[1:])
