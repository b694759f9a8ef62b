"""``int8`` and ``int4``: grouped uniform quantization, the plain baselines that CacheGen is measured against.

Each K and each V vector (one token, one head) is one group: its least value and its scale in float16, and codes of 8 or
4 bits evenly between. That is 8.5 and 4.5 bits per element for a head of 64. Keys grouped along tokens, channel by
channel (KIVI, arXiv 2402.02750, section 3.2), were measured beside it: docs/codecs.md.

A section is, for K and then for V: scales, zeros, codes. All lengths follow from the shape.
"""

import numpy as np
import torch

from kernels.codecs.base import Bytes, SectionReader, Shape, bytes_of, check_layer
from kernels.packing import packed_bytes
from kernels.quant import dequantize_groups, quantize_groups


class GroupedIntegers:
    """See the module. Stateless; any thread."""

    level = 0
    lossy = True
    profile = b""
    generic = False

    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}"
        self._bits = bits

    def encode(self, layer: int, kv: torch.Tensor) -> Bytes:
        """See `Codec`."""
        check_layer(kv)
        parts = []
        for half in kv:
            codes, scale, zero = quantize_groups(_vectors(half), self._bits, half.shape[-1])
            parts += [bytes_of(part.numpy()) for part in (scale, zero, codes)]
        return np.concatenate(parts)

    def decode(self, layer: int, coded: bytes | memoryview | Bytes, out: torch.Tensor) -> None:
        """See `Codec`."""
        check_layer(out)
        section = SectionReader(coded)
        for half in out:
            vectors = _vectors(half)
            rows, cols = vectors.shape
            scale, zero = (torch.from_numpy(section.values(rows, np.float16)).view(rows, 1) for _ in range(2))
            codes = torch.from_numpy(section.values(rows * packed_bytes(cols, self._bits), np.uint8))
            dequantize_groups(codes.view(rows, -1), scale, zero, self._bits, vectors)
        section.end()

    def bound(self, shape: Shape, dtype: torch.dtype) -> int:
        """See `Codec`; exact."""
        halves, tokens, heads, dim = shape
        return halves * tokens * heads * (packed_bytes(dim, self._bits) + 2 * torch.float16.itemsize)


def _vectors(half: torch.Tensor) -> torch.Tensor:
    """(tokens, kv_heads, head_dim)  ->  (tokens * kv_heads, head_dim), the same memory."""
    return half.view(-1, half.shape[-1])
