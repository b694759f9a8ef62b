"""A profile as bytes: little-endian, no padding, every length bounded by what is there before it is believed.

``magic 8s, layers u16, kv_heads u16, head_dim u16, model 16s``; then per layer, for K and for V: means and deviations
(float16, not in a generic profile), a flag, the plan of the anchors if the flag is 1, and the plan of each level. A
plan is ``factor in sixteenths u8, table bytes u16``, the table.
"""

import struct

import numpy as np

from kernels.codecs.base import SectionReader
from kernels.codecs.profile import LEVELS, NO_MODEL, CodecProfile, HalfProfile
from kernels.codecs.step_plan import FACTOR_UNIT, StepPlan
from kernels.rans import SymbolTable

_MAGIC = b"CKVPROF\x01"
_HEAD = struct.Struct("<8sHHH16s")
_FLAG = struct.Struct("<B")
_PLAN = struct.Struct("<BH")


def write(profile: CodecProfile) -> bytes:
    """See the module."""
    parts = [_HEAD.pack(_MAGIC, *profile.shape, profile.model)]
    for half in (half for pair in profile.halves for half in pair):
        parts += [half.mean.astype("<f2").tobytes(), half.deviation.astype("<f2").tobytes()]
        parts += [_FLAG.pack(half.anchors is not None)]
        parts += [_written(plan) for plan in (half.anchors, *half.plans) if plan is not None]
    return b"".join(parts)


def read(coded: bytes) -> CodecProfile:
    """The inverse. Raises ValueError for anything else, in a sentence."""
    reader = SectionReader(coded)
    try:
        magic, layers, heads, dim, model = _HEAD.unpack(reader.take(_HEAD.size).tobytes())
        if magic != _MAGIC:
            raise ValueError("these bytes are no codec profile of this version")
        channels = 0 if model == NO_MODEL else heads * dim
        halves = []
        for _ in range(layers):
            k = _read_half(reader, channels)
            halves.append((k, _read_half(reader, channels)))
        reader.end()
        profile = CodecProfile((layers, heads, dim), model, tuple(halves))
        if write(profile) != coded:
            raise ValueError("it is not as it would be written")
    except ValueError as error:
        raise ValueError(f"the codec profile is damaged ({error}); make it again with `make profile-codec`") from None
    return profile


def _written(plan: StepPlan) -> bytes:
    table = plan.table.to_bytes()
    return _PLAN.pack(round(plan.factor / FACTOR_UNIT), len(table)) + table


def _read_half(reader: SectionReader, channels: int) -> HalfProfile:
    mean, deviation = (reader.values(channels, "<f2").astype(np.float32) for _ in range(2))
    (flag,) = reader.fields(_FLAG)
    anchors = _read_plan(reader) if flag else None
    return HalfProfile(tuple(_read_plan(reader) for _ in LEVELS), anchors, mean, deviation)


def _read_plan(reader: SectionReader) -> StepPlan:
    units, table_bytes = reader.fields(_PLAN)
    return StepPlan(units * FACTOR_UNIT, SymbolTable.from_bytes(reader.take(table_bytes).tobytes()))
