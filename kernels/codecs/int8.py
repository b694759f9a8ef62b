"""``int8``: uniform quantization of each vector, the plain baseline that CacheGen is measured against.

Each K and each V vector (one token, one head) has its least value and its scale in float16, and codes of 8 bits evenly
between: 8.5 bits per element for a head of 64. Asymmetric, as in KIVI (arXiv 2402.02750, section 3.2).

A section is, for K and then for V: scales, zeros, codes. All lengths follow from the shape.
"""

from typing import Any

import numpy as np

from kernels.codecs.base import Bytes, SectionReader, Shape, bytes_of, check_layer
from kernels.codecs.int8_cpu import dequantize, quantize
from kernels.dtypes import Array


class Int8Codec:
    """See the module. Stateless; any thread."""

    name = "int8"
    level = 0
    lossy = True
    profile = b""
    generic = False

    def encode(self, layer: int, kv: Array) -> Bytes:
        """See `Codec`."""
        check_layer(kv)
        parts = []
        for half in kv:
            codes, scale, zero = quantize(_vectors(half))
            parts += [bytes_of(part) for part in (scale, zero, codes)]
        return np.concatenate(parts)

    def decode(self, layer: int, coded: bytes | memoryview | Bytes, out: Array) -> None:
        """See `Codec`."""
        check_layer(out)
        section = SectionReader(coded)
        for half in out:
            vectors = _vectors(half)
            scale, zero = (section.values(len(vectors), np.float16) for _ in range(2))
            codes = section.values(vectors.size, np.uint8).reshape(vectors.shape)
            dequantize(codes, scale, zero, vectors)
        section.end()

    def bound(self, shape: Shape, dtype: np.dtype[Any]) -> int:
        """See `Codec`; exact."""
        halves, tokens, heads, dim = shape
        return halves * tokens * heads * (dim + 2 * np.dtype(np.float16).itemsize)


def _vectors(half: Array) -> Array:
    """(tokens, kv_heads, head_dim)  ->  (tokens * kv_heads, head_dim), the same memory."""
    return half.reshape(-1, half.shape[-1])
