"""Rows of a prompt on their way through a model's layers, in groups that are computed at once.

On the engine thread, between two steps, in inference mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from deployments.engine.load_paths.blending.model import BlendModel, RowGroup
from kernels.blend.rows import slots_of


class Rows:
    """Rows on their way through the layers."""

    def __init__(self, model: BlendModel, positions: torch.Tensor, block_ids: torch.Tensor) -> None:
        self.positions = positions
        self.hidden: torch.Tensor
        self.residual: torch.Tensor | None = None
        self._model = model
        self._block_ids = block_ids
        self._groups: dict[tuple[int, int], RowGroup] = {}

    def slots(self) -> torch.Tensor:
        """Where the KV of all rows lies."""
        return slots_of(self.positions, self._block_ids, self._model.block_size)

    def keep(self, kept: torch.Tensor) -> None:
        """Go on with these rows only."""
        self.positions, self.hidden = self.positions[kept], self.hidden[kept]
        if self.residual is not None:
            self.residual = self.residual[kept]
        self._groups.clear()

    def items(self, layer: int, most: int) -> Iterator[Callable[[], None]]:
        """What is to be called, one after the other, to take all rows through a layer, `most` at once."""
        is_first, is_last = self.residual is None, layer == self._model.layers - 1
        if is_first and not is_last:
            self.residual = torch.empty_like(self.hidden)
        for part in self._parts(most):
            yield partial(self._write_last, part) if is_last else partial(self._compute, layer, part, is_first)

    def captures(self, layer: int, most: int) -> Iterator[Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
        """What is to be called to know a layer's keys and values of all rows, without computing the layer."""
        return (partial(self._capture, layer, part) for part in self._parts(most))

    def _compute(self, layer: int, part: slice, is_first: bool) -> None:
        """In place: of a long prompt two tensors are as much as there is room for."""
        assert self.residual is not None
        given = None if is_first else self.residual[part]
        hidden, residual = self._model.compute(layer, self._group(part), self.hidden[part], given)
        self.residual[part] = residual  # before the hidden states, of which it may be a view
        self.hidden[part] = hidden

    def _write_last(self, part: slice) -> None:
        """Write the last layer's KV only: its output is not read."""
        layer = self._model.layers - 1
        slots = slots_of(self.positions[part], self._block_ids, self._model.block_size)
        self._model.write(layer, *self._capture(layer, part), slots)

    def _capture(self, layer: int, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.keys_and_values(layer, self.positions[part], self.hidden[part], self._residual(part))

    def _parts(self, most: int) -> Iterator[slice]:
        rows = len(self.positions)
        return (slice(start, min(start + most, rows)) for start in range(0, rows, most))

    def _residual(self, part: slice) -> torch.Tensor | None:
        return None if self.residual is None else self.residual[part]

    def _group(self, part: slice) -> RowGroup:
        key = part.start, part.stop
        if key not in self._groups:
            self._groups[key] = self._model.group(self.positions[part], self._block_ids)
        return self._groups[key]
