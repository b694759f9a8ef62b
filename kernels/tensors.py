"""A tensor of KV as the array that codecs work on."""

from typing import Any

import numpy as np
import torch


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor on the CPU as an array of `kernels.dtypes`; shares its memory."""
    array: np.ndarray[Any, Any] = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array
