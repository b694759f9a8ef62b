"""One blend: the KV of a prompt's rows, made of stored chunks and of recomputed rows, item by item.

CacheBlend (arXiv 2405.16444) over vLLM's own layers. With check layer c:

* layers before c are computed for all rows: what is stored of them is never read, so it may still be on its way;
* at c the keys and values of all rows are computed and written. Where reused values differ most from the stored ones,
  the top share of the reused rows is chosen; rows of which nothing is stored are always chosen;
* from c on only the chosen rows go on. After c the stored KV of all reused rows is written, keys moved to where the
  chunk stands now, and the chosen rows overwrite theirs.

Rows are in position order and attention is causal, so groups of rows may follow each other inside a layer. The last
layer's output is not needed, and neither is its attention. A chosen row that is dropped cannot come back.

On the engine thread, between two steps, in inference mode. `items` raises whatever the model raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from deployments.engine.load_paths.blending.model import BlendModel
from deployments.engine.load_paths.blending.rows import Rows
from kernels.blend.rows import change_of, rows_to_compute, slots_of

ROWS_PER_ITEM = 512
ROWS_BESIDE_OTHERS = 256
"""Rows of one layer that are computed at once: fewer where others wait for their next token meanwhile."""


class Item(Enum):
    """What a turn of a blend was."""

    DONE = "done"
    WAITS = "waits"
    """Nothing: stored KV is still on its way."""


class ReusedRun(NamedTuple):
    """Stored KV of consecutive tokens, whole: verified, in host memory."""

    start: int
    """Position of the first token in the prompt."""
    shift: int
    """How far the keys are moved: where the chunk stands now, less where it stood when it was computed."""
    kv: torch.Tensor
    """``(layers from the check layer on, 2, tokens, kv_heads, head_dim)``."""
    tier: str

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.start + self.kv.shape[2]


class ReusedKV(Protocol):
    """What arrives of a prompt's chunks."""

    @property
    def is_over(self) -> bool:
        """Whether all has arrived that will. Any thread."""
        ...

    def runs(self) -> list[ReusedRun]:
        """What has arrived, in order, without overlap, inside the blend's rows; when it is over."""
        ...


@dataclass(frozen=True, slots=True)
class BlendWork:
    """What is to be made: KV of rows `first` to `end` of a prompt, in its blocks; those before `first` are there."""

    tokens: Sequence[int]
    """Of the prompt, up to `end` at least."""
    block_ids: Sequence[int]
    """The prompt's device blocks, from its first one on."""
    first: int
    end: int
    ratio: float
    check_layer: int


@dataclass(slots=True)
class BlendParts:
    """What a blend took, in seconds of the engine thread but for the wait, and what it was about."""

    prefix_wait_s: float = 0.0
    """Until the prompt's own stored prefix was in its blocks."""
    embed_s: float = 0.0
    full_s: float = 0.0
    """Layers before the check layer."""
    fetch_wait_s: float = 0.0
    """At the check layer, for the chunks."""
    select_s: float = 0.0
    """The check layer's keys and values, and the choice."""
    write_s: float = 0.0
    """Moving and writing stored KV."""
    selective_s: float = 0.0
    """Layers from the check layer on, for the chosen rows."""
    rows: int = 0
    reused: int = 0
    """Rows of which KV had arrived."""
    selected: int = 0
    """Of these, the recomputed ones."""
    slices: int = 0
    longest_slice_s: float = 0.0

    @property
    def uncached(self) -> int:
        """Rows of which nothing was stored, or had arrived."""
        return self.rows - self.reused

    def __str__(self) -> str:
        said = [f"{name.removesuffix('_s')} {1e3 * value:.1f} ms" for name, value in asdict(self).items()
                if name.endswith("_s")]  # fmt: skip
        rows = f"{self.rows} rows, {self.reused} reused, {self.selected} of them computed again"
        return f"{rows}; {', '.join(said)}; {self.slices} slices"


@dataclass(slots=True)
class BlendJob:
    """See the module's docstring. `rows_per_item` is asked at every layer."""

    model: BlendModel
    work: BlendWork
    kv: ReusedKV
    rows_per_item: Callable[[], int] = lambda: ROWS_PER_ITEM
    parts: BlendParts = field(default_factory=BlendParts)
    left_by_tier: dict[str, int] = field(default_factory=dict)
    """After its end: reused rows that were not recomputed, by the tier that they came from."""
    chosen: torch.Tensor | None = None
    """Positions of the rows that went through all layers; None before the choice."""

    def items(self) -> Iterator[Item]:
        """Make it, one item at a time; may be left at any item."""
        work, model = self.work, self.model
        block_ids = model.on_device(work.block_ids)
        positions = torch.arange(work.first, work.end, device=model.device)
        self.parts.rows = len(positions)
        check = min(work.check_layer, model.layers - 1)
        rows = Rows(model, positions, block_ids)
        with self._timed("embed_s"):
            rows.hidden = model.embed(model.on_device(work.tokens[work.first : work.end]))
        yield Item.DONE
        for layer in range(check):
            for compute in rows.items(layer, self.rows_per_item()):
                with self._timed("full_s"):
                    compute()
                yield Item.DONE
        began = time.perf_counter()
        while not self.kv.is_over:
            yield Item.WAITS
        self.parts.fetch_wait_s = time.perf_counter() - began
        runs = self.kv.runs()
        self.parts.reused = sum(run.stop - run.start for run in runs)
        if work.ratio < 1 and runs:
            yield from self._choose(rows, check, runs)
        else:
            runs = []
        self.chosen = rows.positions
        self.parts.selected = len(rows.positions) - self.parts.uncached
        for layer in range(check, model.layers):
            if layer > check:  # at the check layer every row's own KV is there
                for run in runs:
                    with self._timed("write_s"):
                        self._write(layer, run, layer - check, block_ids)
                    yield Item.DONE
            for compute in rows.items(layer, self.rows_per_item()):
                with self._timed("selective_s"):
                    compute()
                yield Item.DONE

    def _choose(self, rows: Rows, check: int, runs: list[ReusedRun]) -> Iterator[Item]:
        first = self.work.first
        keys, values = [], []
        for capture in rows.captures(check, self.rows_per_item()):
            with self._timed("select_s"):
                key, value = capture()
                keys.append(key)
                values.append(value)
            yield Item.DONE
        with self._timed("select_s"):
            computed = torch.cat(values)
            self.model.write(check, torch.cat(keys), computed, rows.slots())
            change = torch.zeros(len(computed), device=computed.device)
            reused = torch.zeros(len(computed), dtype=torch.bool, device=computed.device)
            for run in runs:
                at = slice(run.start - first, run.stop - first)
                change[at] = change_of(computed[at], run.kv[0, 1].to(computed.device))
                reused[at] = True
            kept = rows_to_compute(change, reused, self.work.ratio)
            is_left = reused.clone()
            is_left[kept] = False
            for run in runs:
                left = int(is_left[run.start - first : run.stop - first].sum())
                self.left_by_tier[run.tier] = self.left_by_tier.get(run.tier, 0) + left
            rows.keep(kept)
        yield Item.DONE

    def _write(self, layer: int, run: ReusedRun, number: int, block_ids: torch.Tensor) -> None:
        keys, values = run.kv[number]
        positions = torch.arange(run.start, run.stop, device=self.model.device)
        slots = slots_of(positions, block_ids, self.model.block_size)
        moved = self.model.shifted(layer, keys, run.shift)
        self.model.write(layer, moved, values.to(self.model.device), slots)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        setattr(self.parts, part, getattr(self.parts, part) + time.perf_counter() - began)
