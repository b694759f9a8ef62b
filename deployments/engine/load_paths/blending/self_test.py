"""Test, once at start, whether blending computes on this machine, with this model, what vLLM computes.

Of some random tokens, on free blocks of the pool that are given back:

* whole: all rows through the layers, group by group, against vLLM's own forward pass;
* gaps: a part of the rows, in several runs, over KV that is there, against the same;
* moved: each layer's keys at one position, moved to another one, against those computed there.

A model with multipliers outside its layers, layers of another shape, or another rotation of keys fails here.

Leans on vLLM: `BlockPool.get_new_blocks`, `free_blocks`, `get_num_free_blocks`. At start the pool holds nothing, so no
cached block goes and no event is written. On the engine thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deployments.engine.load_paths.blending.job import BlendJob, BlendWork, ReusedRun
from deployments.engine.load_paths.blending.model import BlendModel
from deployments.engine.load_paths.blending.rows import Rows
from kernels.paged.gather_scatter import gather

if TYPE_CHECKING:
    from deployments.transfer.segment_copy import SegmentCopier

TOKENS = 96
GROUP_ROWS = 40
"""Not a divisor: the groups are unequal."""
MOVED_BY = 517
MOST_ERROR = {torch.float32: 1e-4}
MOST_ERROR_OF_HALVES = 1e-2


class SelfTestError(Exception):
    """Blending does not compute what vLLM does, in words."""


class _Nothing:
    """No chunk."""

    is_over = True

    def runs(self) -> list[ReusedRun]:
        return []


def self_test(model: BlendModel, pool: Any, copier: SegmentCopier, max_tokens: int) -> float:
    """The largest relative error that was found. Raises SelfTestError, or whatever the model raises.

    `max_tokens`: of the longest prompt.
    """
    tokens = min(TOKENS, max_tokens // 2)
    blocks = -(-tokens // model.block_size)
    if pool.get_num_free_blocks() < 2 * blocks:
        raise SelfTestError(f"the device pool has no {2 * blocks} free blocks to try it on")
    taken = pool.get_new_blocks(2 * blocks)
    try:
        with torch.inference_mode():
            ids = [block.block_id for block in taken]
            return _Trial(model, copier, tokens, ids[:blocks], ids[blocks:]).worst(max_tokens)
    finally:
        pool.free_blocks(taken)


class _Trial:
    def __init__(
        self, model: BlendModel, copier: SegmentCopier, tokens: int, theirs: list[int], ours: list[int]
    ) -> None:
        draw = torch.Generator().manual_seed(1)
        self._model = model
        self._copier = copier
        self._ours = ours
        self._tokens = torch.randint(0, model.vocabulary, (tokens,), generator=draw).tolist()
        self._positions = torch.arange(tokens, device=model.device)
        self._most = MOST_ERROR.get(model.dtype, MOST_ERROR_OF_HALVES)
        group = model.group(self._positions, model.on_device(theirs))
        model.forward(model.on_device(self._tokens), group)
        self._wanted = self._read(theirs)

    def worst(self, max_tokens: int) -> float:
        return max(self._whole(), self._gaps(), self._moved(max_tokens))

    def _whole(self) -> float:
        work = BlendWork(self._tokens, self._ours, 0, len(self._tokens), 1.0, 1)
        for _ in BlendJob(self._model, work, _Nothing(), lambda: GROUP_ROWS).items():
            pass
        return self._compare("layer by layer", self._read(self._ours), self._wanted)

    def _gaps(self) -> float:
        model = self._model
        positions = self._positions[
            (self._positions % 7 == 3) | (self._positions % 7 > 4) | (self._positions > len(self._tokens) * 2 // 3)
        ]
        rows = Rows(model, positions, model.on_device(self._ours))
        kv = self._wanted[0, :, : len(positions)].to(model.device)
        for layer in range(model.layers):
            model.write(layer, torch.zeros_like(kv[0]), torch.zeros_like(kv[1]), rows.slots())
        rows.hidden = model.embed(model.on_device(self._tokens)[positions])
        for layer in range(model.layers):
            for compute in rows.items(layer, GROUP_ROWS):
                compute()
        return self._compare("of rows with gaps", self._read(self._ours), self._wanted)

    def _moved(self, max_tokens: int) -> float:
        model, worst = self._model, 0.0
        hidden = model.embed(model.on_device(self._tokens))
        by = min(MOVED_BY, max_tokens - len(self._tokens))
        for layer in range(model.layers):
            residual = hidden if layer else None
            here, values = model.keys_and_values(layer, self._positions, hidden, residual)
            there, same = model.keys_and_values(layer, self._positions + by, hidden, residual)
            found = torch.stack((model.shifted(layer, here, by), values))
            wanted = torch.stack((there, same))
            worst = max(worst, self._compare(f"of layer {layer}, moved,", found[None], wanted[None]))
        return worst

    def _read(self, block_ids: list[int]) -> torch.Tensor:
        """``(layers, 2, tokens, kv_heads, head_dim)``, as it lies in the cache."""
        layers, layout = self._copier.layers, self._copier.layout
        kv = torch.empty(layout.segment_shape(len(layers), len(block_ids)), dtype=layout.dtype)
        gather(layers, block_ids, layout, kv)
        return kv[:, :, : len(self._tokens)]

    def _compare(self, what: str, found: torch.Tensor, wanted: torch.Tensor) -> float:
        """The largest relative error of any layer's keys or values. Raises SelfTestError."""
        found, wanted = found.float().flatten(2), wanted.float().flatten(2)
        errors = (found - wanted).norm(dim=2) / wanted.norm(dim=2).clamp_min(1e-9)
        worst = float(errors.max())
        if not worst <= self._most:  # also what is no number
            raise SelfTestError(f"keys and values {what} differ from vLLM's by {worst:.2g} of their size")
        return worst
