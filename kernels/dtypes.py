"""Layout of KV values in numpy arrays, so that code which only moves and codes them needs no torch.

numpy has no bfloat16: an array of uint16 stands for one, value by value its bits. No KV is made of integers, so the
dtype of an array says what its values are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]

BFLOAT16 = np.dtype(np.uint16)
DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": BFLOAT16,
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
"""By the name in a segment's header."""


def bits_of(values: Array) -> Array:
    """The values of a contiguous array as unsigned integers, flat; shares its memory."""
    return values.reshape(-1).view(np.uint16 if values.itemsize == 2 else np.uint32)


def to_float32(values: Array) -> Array:
    """The same values as float32: a copy, unless they are that already."""
    if values.dtype == BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def read_only(values: Array) -> Array:
    """A view that cannot be written to. Numba compiles a function once for these and once for others: one will do."""
    view = values.view()
    view.flags.writeable = False
    return view


def array_of(tensor: torch.Tensor) -> Array:
    """A tensor on the CPU as such an array; shares its memory."""
    import torch  # who has a tensor has loaded it

    array: Array = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array
