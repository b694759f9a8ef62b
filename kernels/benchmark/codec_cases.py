"""Entropy coding and RoPE shifts, one thread: K of one layer of a segment in each call.

The numbers are normally distributed, as KV about is in units of its channels' standard deviations; symbols come of
steps of three quarters of one, which leaves them 2.5 bits of entropy.
"""

import ctypes
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from kernels.benchmark.measuring import Case, Target
from kernels.codecs.steps_cpu import quantize as to_steps
from kernels.dtypes import array_of
from kernels.entropy import rans
from kernels.rope.shift import shift_keys

FAMILIES = ("rans", "rope")
TOKENS, HEADS, HEAD_DIM = 256, 8, 128  # of an 8B model: 512 KiB of bfloat16 a call
CHANNELS = HEADS * HEAD_DIM
STEP, LIMIT = 0.75, 15
VALUE_BYTES = 64 * 2**20  # of bfloat16; twice the last-level cache or more
SYMBOLS = 16 * 2**20

DECODE_TARGET = Target("rate", 250.0)


def codec_cases(families: set[str], value_bytes: int = VALUE_BYTES, num_symbols: int = SYMBOLS) -> Iterator[Case]:
    """The cases of the families that are asked for; GB/s are of bfloat16 that goes in or comes out."""
    generator = torch.Generator().manual_seed(0)
    count = max(2, value_bytes // (TOKENS * CHANNELS * 2))
    values = [torch.randn(TOKENS, CHANNELS, generator=generator).bfloat16() for _ in range(count)]
    outs = [torch.empty_like(value) for value in values]
    if "rans" in families:
        count = max(2, num_symbols // (TOKENS * CHANNELS))
        yield from _entropy_coder([_symbols(value) for value in values[:count]])
    if "rope" in families:
        yield _rope(values, outs)


def _symbols(value: torch.Tensor) -> np.ndarray:
    """What CacheGen's entropy coder is given of these values."""
    step, base = np.full(CHANNELS, STEP, np.float32), np.zeros((1, CHANNELS), np.float32)
    symbols: np.ndarray = to_steps(array_of(value), step, base, 0, LIMIT)[0]
    return symbols.reshape(-1)


def _entropy_coder(symbols: list[np.ndarray]) -> Iterator[Case]:
    """One table for all of them, as a profile has."""
    counts = np.sum([np.bincount(each, minlength=2 * LIMIT + 1) for each in symbols], axis=0)
    table = rans.SymbolTable.from_counts(counts)
    coded = [rans.encode(each, table) for each in symbols]
    outs = [np.empty_like(each) for each in symbols]
    amount = sum(len(each) for each in symbols)
    bits = 8 * sum(len(each) for each in coded) / amount

    def encode_all() -> None:
        for each in symbols:
            rans.encode(each, table)

    def decode_all() -> None:
        for stream, out in zip(coded, outs, strict=True):
            rans.decode(stream, table, out)

    def copy() -> None:
        for each, out in zip(symbols, outs, strict=True):
            ctypes.memmove(out.ctypes.data, each.ctypes.data, len(each))

    label = f"rANS, {bits:.2f} bits a symbol"
    yield Case("rans", f"encode, {label}", amount, len(symbols), encode_all, copy, "M symbols/s")
    yield Case("rans", f"decode, {label}", amount, len(symbols), decode_all, copy, "M symbols/s", DECODE_TARGET)


def _rope(values: list[torch.Tensor], outs: list[torch.Tensor]) -> Case:
    keys = [value.view(TOKENS, HEADS, HEAD_DIM) for value in values]
    inv_freq = 1e6 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)

    def shift_all() -> None:
        for k in keys:
            shift_keys(k, 1000, inv_freq, "neox")

    amount = sum(k.nbytes for k in keys)
    return Case("rope", "shift of keys in place, neox", amount, len(keys), shift_all, partial(_copy_all, values, outs))


def _copy_all(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
