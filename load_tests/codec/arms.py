"""What the codec table compares: every codec and level, with how a layer's bytes, time and ideal bits add up."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kernels.codecs import LEVELS, Codec, CodecProfile, make_codec
from kernels.codecs.cachegen import CacheGenCodec
from kernels.dtypes import BFLOAT16, array_of
from load_tests.codec.model import segments
from load_tests.codec.questions import Judged, summed


@dataclass(slots=True)
class Arm:
    """One codec at one level, and what it did so far."""

    codec: Codec
    raw_bytes: int = 0
    coded_bytes: int = 0
    ideal_bits: float = 0.0
    """What the tables' own entropy comes to; 0 for a codec without tables of a profile."""
    encode_s: float = 0.0
    decode_s: float = 0.0
    """Processor time of the calling thread: what it waits for a core counts for no codec."""
    judged: list[Judged] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.codec.name} {self.codec.level}" if self.codec.level else self.codec.name

    @property
    def ratio(self) -> float:
        """Times smaller than bfloat16."""
        return self.raw_bytes / self.coded_bytes

    def through(self, kv: torch.Tensor) -> torch.Tensor:
        """``kv (layers, 2, tokens, kv_heads, head_dim)`` encoded segment by segment and layer by layer, and decoded."""
        back = torch.empty_like(kv)
        for part in segments(kv):
            for layer in range(len(kv)):
                back[layer, :, part] = self._layer(layer, kv[layer, :, part].contiguous())
        return back

    def _layer(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(kv)
        values, decoded = array_of(kv), array_of(out)
        began = time.thread_time()
        coded = self.codec.encode(layer, values)
        encoded = time.thread_time()
        self.codec.decode(layer, coded, decoded)
        self.decode_s += time.thread_time() - encoded
        self.encode_s += encoded - began
        self.raw_bytes += kv.nbytes
        self.coded_bytes += len(coded)
        if isinstance(self.codec, CacheGenCodec):
            self.ideal_bits += self.codec.symbol_bits(layer, values)
        return out

    def row(self) -> dict[str, Any]:
        """Numbers for the table and the report."""
        found: dict[str, Any] = {
            "codec": self.name,
            "times_smaller_than_bf16": self.ratio,
            "bits_per_element": 16 / self.ratio,
            "encode_mb_per_s": self.raw_bytes / self.encode_s / 1e6,
            "decode_mb_per_s": self.raw_bytes / self.decode_s / 1e6,
        }
        if self.ideal_bits:
            found["bits_over_tables_entropy"] = 8 * self.coded_bytes / self.ideal_bits - 1
        if self.judged:
            found |= summed(self.judged)
        return found


def all_arms(profile: CodecProfile) -> list[Arm]:
    """Lossless first, then the levels; compiled before anything is timed."""
    codecs = [make_codec("lossless"), *(make_codec("cachegen", level, profile) for level in LEVELS)]
    layer = np.zeros((2, 32, *profile.shape[1:]), BFLOAT16)
    for codec in codecs:
        codec.decode(0, codec.encode(0, layer), np.empty_like(layer))
    return [Arm(codec) for codec in codecs]
