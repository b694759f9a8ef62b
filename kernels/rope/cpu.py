"""``kernels.rope.shift.shift_keys`` for the CPU, compiled by Numba, on one thread, without the GIL.

Fastmath is off, and LLVM fuses no multiplication with an addition of its own accord: the results are the reference's
bits. A head is widened into a buffer of its own first, so that LLVM sees that what it reads is not what it writes, also
in place. bfloat16 is uint16 to compiled code, and float16 int16, as in ``quant_cpu.py``; ``_widen`` and ``_narrow`` are
here once more because Numba's cache on disk notices edits of the compiled function's own file only.
"""
# Numba has no type hints: mypy cannot see through its decorators.
# mypy: disallow-untyped-decorators=False

from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types  # type: ignore[import-untyped]
from numba.extending import intrinsic  # type: ignore[import-untyped]

from kernels.rope.reference import Rotation, Style


def shift_keys_cpu(k: torch.Tensor, rotation: Rotation, style: Style, out: torch.Tensor) -> None:
    """``kernels.rope.shift.shift_keys``; the arguments are already checked."""
    arrays = rotation.cos.numpy(), rotation.sin.numpy(), rotation.row.numpy()
    _shift(_array(k), *arrays, style == "neox", _array(out))


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory, with the dtype that tells compiled code its format."""
    if tensor.dtype is torch.float32:
        return tensor.numpy()
    if tensor.dtype is torch.float16:
        return tensor.view(torch.int16).numpy()
    return tensor.view(torch.int16).numpy().view(np.uint16)


@njit(nogil=True, cache=True)
def _shift(k: np.ndarray, cos: np.ndarray, sin: np.ndarray, row: np.ndarray, neox: bool, out: np.ndarray) -> None:
    half = cos.shape[1]
    head_of = np.empty(2 * half, dtype=np.float32)
    for token in range(k.shape[0]):
        for head in range(k.shape[1]):
            source, target = k[token, head], out[token, head]
            if row[token] < 0:
                _copy(source, target)
                continue
            for dim in range(2 * half):
                head_of[dim] = _widen(source[dim])
            if neox:
                _turn_halves(head_of, cos[row[token]], sin[row[token]], target)
            else:
                _turn_neighbours(head_of, cos[row[token]], sin[row[token]], target)
            _copy(source[2 * half :], target[2 * half :])


@njit(nogil=True, cache=True)
def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copy in a loop: for an assignment to a slice Numba compiles the words of an error, for seconds."""
    for dim in range(len(source)):
        target[dim] = source[dim]


@njit(nogil=True, cache=True)
def _turn_halves(head: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray) -> None:
    half = len(cos)
    first, second = head[:half], head[half:]
    out_first, out_second = out[:half], out[half : 2 * half]
    for pair in range(half):
        out_first[pair] = _narrow(first[pair] * cos[pair] - second[pair] * sin[pair], out_first[pair])
    for pair in range(half):
        out_second[pair] = _narrow(second[pair] * cos[pair] + first[pair] * sin[pair], out_second[pair])


@njit(nogil=True, cache=True)
def _turn_neighbours(head: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray) -> None:
    for pair in range(len(cos)):
        first, second = head[2 * pair], head[2 * pair + 1]
        out[2 * pair] = _narrow(first * cos[pair] - second * sin[pair], out[2 * pair])
        out[2 * pair + 1] = _narrow(second * cos[pair] + first * sin[pair], out[2 * pair + 1])


@intrinsic
def _widen(typing_context: Any, stored: Any) -> Any:
    """The float32 of a stored element, exactly."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        (value,) = arguments
        if stored == types.uint16:
            bits = builder.shl(builder.zext(value, ir.IntType(32)), ir.IntType(32)(16))
            return builder.bitcast(bits, ir.FloatType())
        if stored == types.int16:
            return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
        return value

    return types.float32(stored), codegen


@intrinsic
def _narrow(typing_context: Any, value: Any, stored: Any) -> Any:
    """``value`` as an element of the kind of ``stored``, whose own value is not looked at: rounded half to even."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        value, _ = arguments
        if stored == types.int16:
            return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))
        if stored != types.uint16:
            return value
        word = ir.IntType(32)
        bits = builder.bitcast(value, word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.add(builder.add(bits, word(0x7FFF)), odd)
        quiet = builder.or_(
            bits, word(0x400000)
        )  # of a NaN: rounding could carry it into an infinity, or round to zero
        kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
        return builder.trunc(builder.lshr(kept, word(16)), ir.IntType(16))

    return stored(types.float32, stored), codegen
