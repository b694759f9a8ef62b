"""Every method on every case: right or not, and how far the next token's distribution moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch

from load_tests.blending.forward import Prefill, prefill
from load_tests.codec.model import continued, divergence
from load_tests.quality.cases import Case, Stretch
from load_tests.quality.methods import Method
from load_tests.quality.sparse import MaskedKV

Z = 1.96
"""Of a 95 % interval."""


@dataclass
class Cell:
    """Right answers of one kind."""

    right: int = 0
    asked: int = 0

    @property
    def share(self) -> float:
        """Between 0 and 1; not a number where nothing was asked."""
        return self.right / self.asked if self.asked else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, Wilson's (1927): it holds near 0 and 1 too."""
        n, p = self.asked, self.share
        middle, half = p + Z * Z / (2 * n), Z * sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        return (middle - half) / (1 + Z * Z / n), (middle + half) / (1 + Z * Z / n)


@dataclass
class Row:
    """What one method did, or, under the name of `PREFILL`, a whole prefill."""

    name: str
    cells: dict[str, Cell] = field(default_factory=lambda: defaultdict(Cell))
    divergences: list[torch.Tensor] = field(default_factory=list)
    bytes_ratio: float = 1.0
    computed: float = 1.0

    @property
    def kl(self) -> float:
        """Mean over all tokens that were judged, nats; 0 for a prefill itself."""
        return max(0.0, float(torch.cat(self.divergences).mean())) if self.divergences else 0.0


PREFILL = "whole prefill"


def measure(model: Any, cases: Iterable[Case], rows: Sequence[Method], tick: Callable[[], None]) -> list[Row]:
    """The whole prefill first, then a row for each method, all in float32 over KV stored in bfloat16."""
    found = [Row(PREFILL), *(Row(method.name) for method in rows)]
    for case in cases:
        full = prefill(model, case.ids)
        _judge(found[0], case, full, full.logits, 0)
        for row, method in zip(found[1:], rows, strict=True):
            kv = method.kv(model, case, full)
            if kv is None:
                continue
            tokens = (kv.kv if isinstance(kv, MaskedKV) else kv).shape[2]
            # At least the token before the first stretch is computed: its distribution is the first that is judged.
            stop = min(tokens, case.stretches[0].first - 1)
            rest = case.ids[stop:]
            read = kv.continued(rest, stop) if isinstance(kv, MaskedKV) else continued(model, kv[:, :, :stop], rest)
            _judge(row, case, full, read, stop)
        tick()
    for row, method in zip(found[1:], rows, strict=True):
        row.bytes_ratio, row.computed = method.bytes_ratio, method.computed
    return found


def _judge(row: Row, case: Case, full: Prefill, logits: torch.Tensor, offset: int) -> None:
    for stretch in case.stretches:
        before = torch.arange(stretch.first - 1, stretch.stop - 1)
        own = logits[before - offset]
        _count(row.cells[stretch.kind], stretch, own.argmax(-1).tolist(), case.ids[stretch.first : stretch.stop])
        if row.name != PREFILL:
            row.divergences.append(divergence(full.logits[before], own))


def _count(cell: Cell, stretch: Stretch, chosen: list[int], expected: list[int]) -> None:
    same = [one == other for one, other in zip(chosen, expected, strict=True)]
    cell.right += sum(same) if stretch.by_token else all(same)
    cell.asked += len(same) if stretch.by_token else 1
