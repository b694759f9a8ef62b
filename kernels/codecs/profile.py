"""CacheGen's knowledge of a model before it sees a segment: measured once, shared by all, named by digest.

Per (layer, K|V): each channel's mean and standard deviation, and for each level a `StepPlan`. The paper (SIGCOMM 2024,
arXiv 2310.07240, section 5) profiles its distributions per model too; code that builds a table for each chunk instead
spends a good part of a short chunk on tables.

A *generic* profile is for models without a measured one: normal distributions, the paper's three groups of layers with
coarser steps for the deeper ones; means and deviations are then taken from each section and travel in it.

As bytes: little-endian, no padding, every length bounded by what is there before it is believed.
``magic 8s, layers u16, kv_heads u16, head_dim u16, model 16s``; then per layer, for K and for V: means and deviations
(float16, not in a generic profile), a flag, the plan of the anchors if the flag is 1, and the plan of each level. A
plan is ``factor in sixteenths u8, table bytes u16``, the table.

Profiles are immutable: any thread.
"""

import functools
import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernels.codecs.base import SectionReader
from kernels.codecs.step_plan import FACTOR_UNIT, StepPlan, normal_histogram, plan_for
from kernels.entropy.rans import SymbolTable

Array = np.ndarray[Any, Any]

LEVELS = (1, 2, 3)
DIGEST_BYTES = 16
MODEL_BYTES = 16
NO_MODEL = bytes(MODEL_BYTES)
GROUP_TOKENS = 10
"""An anchor and the nine tokens after it (section 5.2)."""
ANCHOR_FACTOR = 1 / 16
"""Anchors are quantized to 8 bits: 255 steps of a sixteenth of a deviation."""

_MAGIC = b"CKVPROF\x01"
_HEAD = struct.Struct("<8sHHH16s")
_FLAG = struct.Struct("<B")
_PLAN = struct.Struct("<BH")

# Thirds of the layers, shallow to deep: the ratios of the paper's section 5.2, shared among three levels.
_GENERIC_FACTORS = {1: (0.25, 0.375, 0.5), 2: (0.5, 0.75, 1.0), 3: (1.0, 1.5, 2.0)}

ProfileShape = tuple[int, int, int]
"""(layers, kv_heads, head_dim)"""


@dataclass(frozen=True, eq=False)
class HalfProfile:
    """The K or the V of one layer."""

    plans: tuple[StepPlan, ...]
    """One for each of `LEVELS`: of the deltas where ``anchors`` is set, else of the values less their means."""
    anchors: StepPlan | None
    """How anchors are coded; None where the profile showed that groups with anchors save no bits."""
    mean: Array
    """float32 (kv_heads * head_dim,); empty in a generic profile."""
    deviation: Array
    """float32 (kv_heads * head_dim,), positive; empty in a generic profile."""


@dataclass(frozen=True, eq=False)
class CodecProfile:
    """See the module. Raises ValueError for parts that contradict each other."""

    shape: ProfileShape
    model: bytes
    """`MODEL_BYTES` that identify the weights it was measured on; zeros for a generic one."""
    halves: tuple[tuple[HalfProfile, HalfProfile], ...]
    """Per layer: K, V."""

    def __post_init__(self) -> None:
        layers, heads, dim = self.shape
        if min(self.shape) < 1 or len(self.halves) != layers or len(self.model) != MODEL_BYTES:
            raise ValueError(f"a profile of shape {self.shape} has {layers} layers and {MODEL_BYTES} bytes of model")
        channels = 0 if self.is_generic else heads * dim
        for half in (half for pair in self.halves for half in pair):
            if len(half.plans) != len(LEVELS) or half.mean.shape != (channels,) or half.deviation.shape != (channels,):
                raise ValueError(f"each K and V of a profile has {len(LEVELS)} plans and {channels} channels")
            if not np.isfinite(half.mean).all() or not np.isfinite(half.deviation).all() or (half.deviation <= 0).any():
                raise ValueError("a profile's means and deviations are finite, its deviations positive")
            if half.anchors is not None and (self.is_generic or half.anchors.factor != ANCHOR_FACTOR):
                raise ValueError("anchors are for measured profiles, in steps of a sixteenth of a deviation")

    @property
    def is_generic(self) -> bool:
        """Whether it stands in for a measured profile."""
        return self.model == NO_MODEL

    @functools.cached_property
    def digest(self) -> bytes:
        """What headers name it by: the first 16 bytes of its bytes' SHA-256."""
        return hashlib.sha256(self.to_bytes()).digest()[:DIGEST_BYTES]

    def to_bytes(self) -> bytes:
        """The profile as bytes, always the same ones; asked for with every segment that is written."""
        return self._coded

    @functools.cached_property
    def _coded(self) -> bytes:
        parts = [_HEAD.pack(_MAGIC, *self.shape, self.model)]
        for half in (half for pair in self.halves for half in pair):
            parts += [half.mean.astype("<f2").tobytes(), half.deviation.astype("<f2").tobytes()]
            parts += [_FLAG.pack(half.anchors is not None)]
            parts += [_written(plan) for plan in (half.anchors, *half.plans) if plan is not None]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, coded: bytes) -> "CodecProfile":
        """The inverse. Raises ValueError, in a sentence, for anything that `to_bytes` cannot have written."""
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
            profile = cls((layers, heads, dim), model, tuple(halves))
            if profile.to_bytes() != coded:
                raise ValueError("it is not as it would be written")
        except ValueError as error:
            raise ValueError(
                f"the codec profile is damaged ({error}); make it again with `make profile-codec`"
            ) from None
        return profile

    @classmethod
    def generic(cls, shape: ProfileShape) -> "CodecProfile":
        """See the module; the same for every model of this shape."""
        none = np.empty(0, np.float32)
        counts = normal_histogram()
        by_factor = {factor: plan_for(counts, factor)[0] for factors in _GENERIC_FACTORS.values() for factor in factors}
        thirds = [
            HalfProfile(tuple(by_factor[_GENERIC_FACTORS[level][third]] for level in LEVELS), None, none, none)
            for third in range(3)
        ]
        layers = shape[0]
        return cls(shape, NO_MODEL, tuple((thirds[3 * layer // layers],) * 2 for layer in range(layers)))

    def check(self, shape: ProfileShape, model: bytes) -> None:
        """Raise ValueError, in a sentence for people, unless this profile is for a model of that shape and weights."""
        if self.shape != shape:
            raise ValueError(
                f"the codec profile is for {_words(self.shape)}, the model has {_words(shape)}; "
                f"make one with `make profile-codec MODEL=...`"
            )
        if not self.is_generic and self.model != model:
            raise ValueError(
                f"the codec profile was measured on weights {self.model.hex()}, the model's are {model.hex()}; "
                f"make one with `make profile-codec MODEL=...`"
            )


def _words(shape: ProfileShape) -> str:
    layers, heads, dim = shape
    return f"{layers} layers with {heads} KV heads of {dim}"


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
