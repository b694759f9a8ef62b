"""What names a blend: the share of its reused tokens that is recomputed, in steps, as the variant of its salt.

Pure: any thread.
"""

from typing import Final

RATIO_STEPS: Final = 16
"""Shares of a blend that is computed have as many names, and one more for 0."""


def ratio_step(recompute_ratio: float) -> int:
    """Return the sixteenth, 0 to `RATIO_STEPS`, under which blends are named that compute this share of their tokens.

    The nearest one; but the first and the last are of 0 and 1 alone: what computes a little differs most from what
    computes nothing, and what computes all is right. Raises ValueError for what is no share.
    """
    if not 0 <= recompute_ratio <= 1:
        raise ValueError(f"recompute_ratio is a share from 0 to 1, got {recompute_ratio}")
    if recompute_ratio in (0, 1):
        return RATIO_STEPS * int(recompute_ratio)
    return min(max(round(RATIO_STEPS * recompute_ratio), 1), RATIO_STEPS - 1)


def blend_variant(recompute_ratio: float) -> str:
    """Return the variant of `kvmanager.segments.keys.cache_salt` for such blends. Raises ValueError as `ratio_step`."""
    return str(ratio_step(recompute_ratio))
