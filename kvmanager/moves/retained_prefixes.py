"""Prefixes of tolerant prompts that are stored sparse, as a plan has them: whole segments from the first block on.

One sparse segment makes the whole prefix a sparse load, its dense segments with it: what a layer keeps of those is all.
Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmanager.segments.budgets import Budgets
from kvmanager.segments.forms import kept_digest
from kvmanager.segments.keys import BlockHash


@dataclass(frozen=True, slots=True)
class SparseQuery:
    """A tolerant prompt whose engine presents ``budgets``.

    ``hashes`` are its tolerant ones, of which ``most_blocks`` at most may be a prefix: the rest has a token to compute.
    Below ``least_blocks`` its device has as much, dense.
    """

    hashes: Sequence[BlockHash]
    budgets: Budgets
    most_blocks: int
    least_blocks: int = 0


class RetainedPrefix(NamedTuple):
    """What a sparse load presents of the segments of its plan."""

    kept: tuple[tuple[int, ...], ...]
    """Blocks of keys that each layer keeps, by segment."""
    forms: tuple[bytes, ...]
    """Of the copies that are loaded (`kvmanager.segments.forms`)."""
    digest: bytes
    """Names what is kept."""


def retained_prefix(budgets: Budgets, blocks: Sequence[int], forms: Sequence[bytes]) -> RetainedPrefix | None:
    """Return what is kept of segments with these ``blocks`` and ``forms``; None where all of them are dense."""
    if not any(forms):
        return None
    layers = range(len(budgets.shares))
    kept = tuple(
        tuple(budgets.kept_blocks(layer, count) if form else count for layer in layers)
        for count, form in zip(blocks, forms, strict=True)
    )
    return RetainedPrefix(kept, tuple(forms), kept_digest(budgets, forms))
