"""Codecs of a few lines in place of `kernels.codecs`, and segments that they make smaller."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
from redis_fixture import FINGERPRINT, SHAPE

from kernels.dtypes import Array
from kernels.errors import CodecError
from kvmanager.segments.format import SegmentHeader, seal
from kvmanager.segments.spans import SegmentSpan
from load_tests.harness.memory_port import made_up_hashes


class SmallProfile:
    """Its content is a shift; `model` is 16 bytes, zeros for a generic one."""

    shape = (SHAPE[0], *SHAPE[3:])

    def __init__(self, shift: int, model: bytes = bytes(16)) -> None:
        self.shift = shift
        self.model = model
        self.digest = hashlib.sha256(self.to_bytes()).digest()[:16]

    def to_bytes(self) -> bytes:
        return b"profile" + bytes([self.shift]) + self.model

    @classmethod
    def from_bytes(cls, content: bytes) -> SmallProfile:
        if not content.startswith(b"profile") or len(content) != 24:
            raise ValueError("no profile")
        return cls(content[7], content[8:])

    @classmethod
    def generic(cls, shape: Any) -> SmallProfile:
        return cls(shape[0])


class Lossless:
    name, level, lossy, profile = "lossless", 0, False, b""

    def encode(self, layer: int, kv: Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.frombuffer(zlib.compress(_flat(kv).tobytes()), np.uint8)

    def decode(self, layer: int, coded: memoryview, out: Array) -> None:
        flat = _flat(out)
        try:
            found = zlib.decompressobj().decompress(coded, flat.nbytes + 1)
        except zlib.error as error:
            raise CodecError(str(error)) from None
        if len(found) != flat.nbytes:
            raise CodecError("another length")
        flat[:] = np.frombuffer(found, np.uint8)


class Halves:
    """Keeps the upper byte of each 16-bit value."""

    name, lossy = "cachegen", True

    def __init__(self, level: int, profile: SmallProfile) -> None:
        self.level, self.profile, self._shift = level, profile.digest, profile.shift

    def encode(self, layer: int, kv: Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return _flat(kv)[1::2] + np.uint8(self._shift)

    def decode(self, layer: int, coded: memoryview, out: Array) -> None:
        flat = _flat(out)
        if 2 * len(coded) != flat.nbytes:
            raise CodecError("another length")
        flat[0::2], flat[1::2] = 0, np.frombuffer(coded, np.uint8) - np.uint8(self._shift)


class SmallKit:
    """What `kernels.codecs` offers; `made` notes what was asked for."""

    CodecProfile = SmallProfile

    def __init__(self) -> None:
        self.made: list[tuple[str, int, bytes]] = []
        self.lossless: Any = Lossless()

    def make_codec(self, name: str, level: int = 0, profile: SmallProfile | None = None) -> Any:
        self.made.append((name, level, profile.digest if profile else b""))
        if name == "lossless" and level == 0:
            return self.lossless
        if name == "cachegen" and 1 <= level <= 3 and profile is not None:
            return Halves(level, profile)
        raise ValueError(f"no codec {name} of level {level}")


def kv_segment(
    span: SegmentSpan, fidelity: str = "exact", shape: Any = SHAPE, fingerprint: bytes = FINGERPRINT
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A segment of bfloat16 values whose upper bytes are alike, as a model's are."""
    header = replace(SegmentHeader.raw(span, made_up_hashes(span), fingerprint, shape, "bfloat16"), fidelity=fidelity)
    buffer = np.random.default_rng(int.from_bytes(span.key)).integers(0, 256, header.sealed_bytes, np.uint8)
    buffer[header.body_offset + 1 :: 2] = 0x3F
    seal(buffer.data, header)
    return buffer


def _flat(kv: Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return kv.reshape(-1).view(np.uint8)
