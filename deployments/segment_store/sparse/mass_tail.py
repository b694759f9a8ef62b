"""The attention mass of a raw segment, as its tail in the CPU tier: what decides which tokens a sparse copy keeps.

float16 (layers, kv_heads, tokens). A segment without one is never sparse. Pure functions: any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deployments.segment_store.segment_tail import TAIL_HEAD_BYTES, with_tail
from kvmanager.segments.format import Shape

Mass = np.ndarray[Any, np.dtype[np.float16]]
"""(layers, kv_heads, tokens)."""


def mass_bytes(layers: int, kv_heads: int, tokens: int) -> int:
    """What the mass of a segment takes behind it."""
    return TAIL_HEAD_BYTES + 2 * layers * kv_heads * tokens


def with_mass(sealed: np.ndarray[Any, np.dtype[np.uint8]], mass: Mass) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A sealed raw segment with its mass behind it."""
    return with_tail(sealed, np.ascontiguousarray(mass, np.float16).tobytes())


def mass_of(content: memoryview, shape: Shape) -> Mass | None:
    """The mass that a tail holds, of a segment of this shape; None for a tail of another size."""
    layers, _, tokens, heads, _ = shape
    if len(content) != 2 * layers * heads * tokens:
        return None
    return np.frombuffer(content, np.float16).reshape(layers, heads, tokens)
