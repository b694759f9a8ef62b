"""Feeds bytes of all kinds to whatever reads stored KV or traces: a value or a declared error, nothing else.

Memory is bounded by `MOST_BYTES` above what the process has, time by the input.
"""

from __future__ import annotations

import itertools
import json
import resource
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deployments.segment_store.segment_codecs import RAW_CODING, SegmentCodecs
from kernels.codecs import CodecError, CodecProfile, make_codec
from kernels.dtypes import Array, array_of
from kvmanager.segments.format import SegmentHeader, SegmentMismatch, open_layers, read_header, seal, verify
from kvmanager.segments.head import reseal_header
from kvmanager.segments.spans import NodeKind, SegmentKey, SegmentSpan
from load_tests.simulator.trace import TraceError, read_trace

KEY, FINGERPRINT = b"k" * 32, b"f" * 32
SHAPE = (2, 2, 32, 1, 8)
MOST_BYTES = 1 << 30
LINE = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}


class NoProfiles:
    """There is none in Redis, or what is there is noise."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content

    def get(self, digest: bytes) -> bytes | None:
        return self.content

    def keep(self, digest: bytes, content: bytes) -> None: ...


class DecoderFuzz:
    """One run; `failures` maps a sentence to the input, in hexadecimal digits."""

    def __init__(self, random_seed: int) -> None:
        self.random = np.random.default_rng(random_seed)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.failures: dict[str, str] = {}
        self._folder = tempfile.TemporaryDirectory()

    def run(self, cases: int) -> None:
        """About `cases` inputs for each reader."""
        segment = raw_segment()
        profile = CodecProfile.generic((2, 1, 8))
        targets: list[tuple[str, Callable[[bytes], Any], list[bytes], tuple[type[BaseException], ...]]] = [
            ("header", read_header, [segment], (SegmentMismatch,)),
            ("segment", lambda data: verify(data, key=KEY, fingerprint=FINGERPRINT), [segment], (SegmentMismatch,)),
            ("resealed segment", _read_resealed, [segment], (SegmentMismatch,)),
            ("codec profile", CodecProfile.from_bytes, [profile.to_bytes()], (ValueError,)),
            ("codec of a header", _choose_codec, [segment], (SegmentMismatch,)),
            ("trace", self._read_trace, trace_files(), (TraceError,)),
        ]
        values = array_of(torch.randn((2, 32, 1, 8), generator=torch.Generator().manual_seed(1)).bfloat16())
        for name, level in (("lossless", 0), ("cachegen", 2)):
            codec = make_codec(name, level, profile if name == "cachegen" else None)
            good = [bytes(codec.encode(0, values)), bytes(codec.encode(1, np.zeros_like(values)))]
            targets.append((f"codec {name}", _decoder(codec, values), good, (CodecError,)))
        with memory_limit(MOST_BYTES):
            for name, read, good, declared in targets:
                for data in itertools.islice(self._inputs(good), cases):
                    self._feed(name, read, data, declared)

    def _inputs(self, good: list[bytes]) -> Any:
        yield b""
        yield from good
        while True:
            yield self._mutated(good[self.random.integers(len(good))])

    def _mutated(self, data: bytes) -> bytes:
        changed = bytearray(data)
        kind = self.random.integers(6)
        if kind == 0:
            return bytes(changed[: self.random.integers(len(changed) + 1)])
        if kind == 1:
            return bytes(changed) + self.random.bytes(self.random.integers(1, 64))
        if kind == 2:
            return self.random.bytes(self.random.integers(600))
        for _ in range(1 << self.random.integers(5)):
            at = self.random.integers(min(len(changed), 320) if kind == 3 else len(changed))
            changed[at] = self.random.choice([0, 1, 127, 128, 255, changed[at] ^ (1 << self.random.integers(8))])
        return bytes(changed)

    def _feed(
        self, name: str, read: Callable[[bytes], Any], data: bytes, declared: tuple[type[BaseException], ...]
    ) -> None:
        try:
            read(data)
            self.outcomes[name, "read"] += 1
        except declared:
            self.outcomes[name, "refused"] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            self.outcomes[name, "failed"] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{name}: {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
            self.failures.setdefault(what, data.hex()[:2000])

    def _read_trace(self, data: bytes) -> Any:
        path = Path(self._folder.name) / "trace.jsonl"
        path.write_bytes(data)
        return read_trace(path)


class memory_limit:  # noqa: N801 - a context manager reads like a function
    """Within it the process may take so many bytes more of address space: what asks for more gets a MemoryError."""

    def __init__(self, more: int) -> None:
        self._more = more
        self._before = resource.getrlimit(resource.RLIMIT_AS)

    def __enter__(self) -> None:
        now = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + self._more, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)


def raw_segment() -> bytes:
    """A sealed segment of two layers."""
    span = SegmentSpan(SegmentKey(KEY), None, 0, 1, NodeKind.REQUEST, KEY[:8])
    header = SegmentHeader.raw(span, KEY, FINGERPRINT, SHAPE, "bfloat16")
    buffer = bytearray(np.random.default_rng(2).bytes(header.sealed_bytes))
    seal(buffer, header)
    return bytes(buffer)


def trace_files() -> list[bytes]:
    """Traces, right and wrong, to start from."""
    line = json.dumps(LINE).encode()
    return [
        line + b"\n" + line,
        line.replace(b"5", b"1e999"),
        line.replace(b"[1, 2]", b"[" * 3000 + b"]" * 3000),
        line.replace(b"700", b"9" * 5000),
        line.replace(b"[1, 2]", b'["\\ud800"]'),
        b'{"timestamp": NaN}',
    ]


def _read_resealed(data: bytes) -> Any:
    """As whoever can write the store would make it: with a header that is sound in itself."""
    buffer = bytearray(data)
    if len(buffer) >= 256:
        reseal_header(buffer)
    return open_layers(
        bytes(buffer), key=KEY, fingerprint=FINGERPRINT, shape=SHAPE, dtype="bfloat16", num_blocks=1
    ).verify()


def _choose_codec(data: bytes) -> Any:
    buffer = bytearray(data)
    if len(buffer) >= 256:
        reseal_header(buffer)
    return SegmentCodecs(RAW_CODING, NoProfiles(bytes(data[:64]) or None)).for_reading(read_header(bytes(buffer)))


def _decoder(codec: Any, like: Array) -> Callable[[bytes], Any]:
    out = np.empty_like(like)
    return lambda data: codec.decode(0, np.frombuffer(data, dtype=np.uint8), out)
