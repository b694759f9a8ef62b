"""``cachegen``: quantization in steps of each channel's standard deviation, then entropy coding (levels 1 to 3).

CacheGen's encoding (SIGCOMM 2024, arXiv 2310.07240, section 5.2) with the distributions where the paper has them, in a
profile that is shared (`kernels.codecs.profile`), so that a section carries symbols and no tables. Means, deviations,
steps, tables and whether a layer's K or V goes by groups of 10 tokens with an anchor all come from the profile. In such
a group the first token is coded in 8 bits, and each of the nine others by its difference from *that* token as decoded,
so that they do not depend on each other.

A section is K's half, then V's. A half is ``form u8``, then, with a generic profile, the channels' means and deviations
(float16), then the stream of the anchors if there are any, then the stream of the others. A stream is ``coded bytes
u32, escapes u32``, the coded symbols, the escaped values in the layer's dtype. Form 0 is the elements as they are,
where coding would not be shorter. NaN counts as zero steps, as `steps_cpu.quantize` says.
"""

import struct
from typing import Any

import numpy as np

from kernels.codecs.base import Bytes, SectionReader, Shape, bytes_of, check_layer, check_number, raw_bytes
from kernels.codecs.profile import GROUP_TOKENS, LEVELS, CodecProfile, HalfProfile
from kernels.codecs.step_plan import StepPlan
from kernels.codecs.steps_cpu import quantize, restore, statistics
from kernels.dtypes import Array, bits_of, to_float32
from kernels.entropy import rans
from kernels.errors import CodecError

_FORM = struct.Struct("<B")
_STREAM = struct.Struct("<II")
_RAW, _CODED = 0, 1
_LEAST_DEVIATION = 2.0**-14  # float16's least normal number
_MOST = 60_000.0  # of a mean or a deviation that travels in float16


class CacheGenCodec:
    """See the module. Stateless; any thread. Raises ValueError for a level that does not exist."""

    name = "cachegen"
    lossy = True

    def __init__(self, level: int, profile: CodecProfile) -> None:
        if level not in LEVELS:
            raise ValueError(f"cachegen has levels {LEVELS[0]} to {LEVELS[-1]}, not {level}")
        self.level = level
        self.profile = profile.digest
        self.generic = profile.is_generic
        self._halves = profile.halves
        self._heads = profile.shape[1:]

    def encode(self, layer: int, kv: Array) -> Bytes:
        """See `Codec`."""
        self._check(layer, kv)
        parts = []
        for half, of_half in zip(kv, self._halves[layer], strict=True):
            x = half.reshape(half.shape[0], -1)
            coded = [_form(_CODED), *self._encode_half(x, of_half)]
            raw = bytes_of(bits_of(half))
            parts += coded if sum(map(len, coded)) <= len(raw) else [_form(_RAW), raw]
        return np.concatenate(parts)

    def decode(self, layer: int, coded: bytes | memoryview | Bytes, out: Array) -> None:
        """See `Codec`."""
        self._check(layer, out)
        section = SectionReader(coded)
        for half, of_half in zip(out, self._halves[layer], strict=True):
            (form,) = section.fields(_FORM)
            if form == _RAW:
                raw = bytes_of(bits_of(half))
                raw[:] = section.take(len(raw))
            elif form == _CODED:
                self._decode_half(section, of_half, half.reshape(half.shape[0], -1))
            else:
                raise CodecError(f"a half of form {form}")
        section.end()

    def bound(self, shape: Shape, dtype: np.dtype[Any]) -> int:
        """See `Codec`."""
        return raw_bytes(shape, dtype) + 2 * _FORM.size

    def symbol_bits(self, layer: int, kv: Array) -> float:
        """Bits that ideal coding of this layer's symbols takes with the profile's tables, escaped values included.

        What the coder itself costs is the difference to the section's length; for measuring.
        """
        self._check(layer, kv)
        return sum(
            plan.table.entropy_bits(np.bincount(symbols.reshape(-1))) + 8 * values.nbytes
            for half, of_half in zip(kv, self._halves[layer], strict=True)
            for symbols, plan, values in self._streams(half.reshape(half.shape[0], -1), of_half, [])
        )

    def _check(self, layer: int, kv: Array) -> None:
        check_layer(kv)
        check_number(layer, len(self._halves))
        if kv.shape[2:] != self._heads:
            raise ValueError(f"the profile is for KV heads x head dimension {self._heads}, got {kv.shape[2:]}")

    def _encode_half(self, x: Array, of_half: HalfProfile) -> list[Bytes]:
        parts: list[Bytes] = []
        for symbols, plan, values in self._streams(x, of_half, parts):
            coded = rans.encode(symbols.reshape(-1), plan.table)
            parts += [np.frombuffer(_STREAM.pack(len(coded), values.size), np.uint8), coded, bytes_of(values)]
        return parts

    def _streams(self, x: Array, of_half: HalfProfile, channels: list[Bytes]) -> list[tuple[Array, StepPlan, Array]]:
        """(symbols, plan, escaped values as bits) of each stream; a generic profile's statistics go to ``channels``."""
        plan = of_half.plans[self.level - 1]
        mean, deviation = of_half.mean, of_half.deviation
        if self.generic:
            mean, deviation = (part.astype(np.float16) for part in statistics(x, _LEAST_DEVIATION, _MOST))
            channels += [bytes_of(mean), bytes_of(deviation)]
            mean, deviation = mean.astype(np.float32), deviation.astype(np.float32)
        step = deviation * np.float32(plan.factor)
        if of_half.anchors is None:
            symbols, values = quantize(x, step, mean[None], 0, plan.limit)
            return [(symbols, plan, values)]
        anchors = of_half.anchors
        coarse = deviation * np.float32(anchors.factor)
        symbols, values = quantize(np.ascontiguousarray(x[::GROUP_TOKENS]), coarse, mean[None], 0, anchors.limit)
        streams = [(symbols, anchors, values)]
        if len(x) > len(symbols):
            base = _anchor_rows(symbols, anchors, values, x.dtype, of_half)
            symbols, values = quantize(x, step, base, GROUP_TOKENS, plan.limit)
            streams.append((symbols, plan, values))
        return streams

    def _decode_half(self, section: SectionReader, of_half: HalfProfile, out: Array) -> None:
        plan = of_half.plans[self.level - 1]
        tokens, channels = out.shape
        mean, deviation = of_half.mean, of_half.deviation
        if self.generic:
            mean, deviation = (section.values(channels, np.float16).astype(np.float32) for _ in range(2))
            if not (np.isfinite(mean).all() and np.isfinite(deviation).all()):
                raise CodecError("a channel's mean or deviation is not finite")
        base, every = mean[None], 0
        if of_half.anchors is not None:
            every = GROUP_TOKENS
            anchors = -(-tokens // every)
            symbols, values = _read_stream(section, of_half.anchors, (anchors, channels), out.dtype)
            base = _anchor_rows(symbols, of_half.anchors, values, out.dtype, of_half)
            tokens -= anchors
        shape = (tokens, channels)
        if tokens:
            symbols, values = _read_stream(section, plan, shape, out.dtype)
        else:
            symbols, values = np.empty(shape, np.uint8), np.empty(0, np.uint16)
        step, escaped = deviation * np.float32(plan.factor), to_float32(values.view(out.dtype))
        restore(symbols, plan.limit, step, base, every, escaped, out)


def _anchor_rows(symbols: Array, plan: StepPlan, values: Array, dtype: np.dtype[Any], of_half: HalfProfile) -> Array:
    """float32 (groups, channels): the anchors as a decoder has them, which is what deltas are taken from."""
    rows = np.empty(symbols.shape, np.float32)
    step = of_half.deviation * np.float32(plan.factor)
    restore(symbols, plan.limit, step, of_half.mean[None], 0, to_float32(values.view(dtype)), rows)
    return rows


def _read_stream(
    section: SectionReader, plan: StepPlan, shape: tuple[int, int], dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """(symbols of ``shape``, escaped values as bits)."""
    count = shape[0] * shape[1]
    coded_bytes, escapes = section.fields(_STREAM)
    if coded_bytes > rans.coded_bound(count) or escapes > count:
        raise CodecError(f"{coded_bytes} coded bytes and {escapes} escapes for {count} symbols")
    symbols = np.empty(count, np.uint8)
    rans.decode(section.take(coded_bytes), plan.table, symbols)
    values = section.values(escapes, np.uint16 if dtype.itemsize == 2 else np.uint32)
    return symbols.reshape(shape), values


def _form(form: int) -> Bytes:
    return np.frombuffer(_FORM.pack(form), np.uint8)
