"""``kernels.packing`` for the CPU, compiled by Numba, on one thread, without the GIL."""
# Numba has no type hints: mypy cannot see through its decorators.
# mypy: disallow-untyped-decorators=False

import numpy as np
import torch
from numba import njit  # type: ignore[import-untyped]

from kernels.packing import packed_bytes


def pack_cpu(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """``codes`` uint8 ``(rows, cols)``, each below ``2**bits``, contiguous  ->  packed; of 8 bits: ``codes`` itself."""
    if bits == 8:
        return codes
    packed = torch.empty(codes.shape[0], packed_bytes(codes.shape[1], bits), dtype=torch.uint8)
    _pack(codes.numpy(), bits, packed.numpy())
    return packed


def unpack_cpu(packed: torch.Tensor, bits: int, cols: int) -> torch.Tensor:
    """The reverse of ``pack_cpu``."""
    if bits == 8:
        return packed
    codes = torch.empty(packed.shape[0], cols, dtype=torch.uint8)
    _unpack(packed.numpy(), bits, codes.numpy())
    return codes


@njit(nogil=True, cache=True)
def _pack(codes: np.ndarray, bits: int, packed: np.ndarray) -> None:
    for row in range(codes.shape[0]):
        if bits == 4:
            _pack_4(codes[row], packed[row])
        elif bits == 2:
            _pack_2(codes[row], packed[row])
        else:
            _pack_any(codes[row], bits, packed[row])


@njit(nogil=True, cache=True)
def _unpack(packed: np.ndarray, bits: int, codes: np.ndarray) -> None:
    for row in range(codes.shape[0]):
        if bits == 4:
            _unpack_4(packed[row], codes[row])
        elif bits == 2:
            _unpack_2(packed[row], codes[row])
        else:
            _unpack_any(packed[row], bits, codes[row])


@njit(nogil=True, cache=True)
def _pack_4(codes: np.ndarray, packed: np.ndarray) -> None:
    for index in range(len(codes) // 2):
        packed[index] = codes[2 * index] | codes[2 * index + 1] << 4
    if len(codes) % 2:
        packed[-1] = codes[-1]


@njit(nogil=True, cache=True)
def _unpack_4(packed: np.ndarray, codes: np.ndarray) -> None:
    for index in range(len(codes) // 2):
        codes[2 * index] = packed[index] & 15
        codes[2 * index + 1] = packed[index] >> 4
    if len(codes) % 2:
        codes[-1] = packed[-1] & 15


@njit(nogil=True, cache=True)
def _pack_2(codes: np.ndarray, packed: np.ndarray) -> None:
    whole = len(codes) // 4
    for index in range(whole):
        first = codes[4 * index] | codes[4 * index + 1] << 2
        packed[index] = first | codes[4 * index + 2] << 4 | codes[4 * index + 3] << 6
    if whole < len(packed):
        _pack_any(codes[4 * whole :], 2, packed[whole:])


@njit(nogil=True, cache=True)
def _unpack_2(packed: np.ndarray, codes: np.ndarray) -> None:
    whole = len(codes) // 4
    for index in range(whole):
        for place in range(4):
            codes[4 * index + place] = packed[index] >> (2 * place) & 3
    if whole < len(packed):
        _unpack_any(packed[whole:], 2, codes[4 * whole :])


@njit(nogil=True, cache=True)
def _pack_any(codes: np.ndarray, bits: int, packed: np.ndarray) -> None:
    """Through a window of at most 15 bits, the low ones first."""
    window, filled, byte = np.uint32(0), 0, 0
    for code in codes:
        window |= np.uint32(code) << np.uint32(filled)
        filled += bits
        if filled >= 8:
            packed[byte] = window & 255
            window, filled, byte = window >> np.uint32(8), filled - 8, byte + 1
    if filled:
        packed[byte] = window & 255


@njit(nogil=True, cache=True)
def _unpack_any(packed: np.ndarray, bits: int, codes: np.ndarray) -> None:
    mask = np.uint32(2**bits - 1)
    window, filled, byte = np.uint32(0), 0, 0
    for index in range(len(codes)):
        if filled < bits:
            window |= np.uint32(packed[byte]) << np.uint32(filled)
            filled, byte = filled + 8, byte + 1
        codes[index] = window & mask
        window, filled = window >> np.uint32(bits), filled - bits
