"""A sample of one prompt's queries, while it is computed, and the attention mass of its segments made of it.

Every 16th query of each layer is copied on the engine thread as it is computed (`queries.py`). The save
thread asks what attention they give to a segment's keys, when it has copied those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from deployments.segment_store.sparse.mass_tail import Mass, mass_bytes, with_mass
from kernels.dtypes import DTYPES, array_of
from kernels.sparse.mass import attention_mass
from kvmanager.segments.format import read_header


@dataclass(slots=True)
class SampledStep:
    """What one step computed: positions in the sequence `(n,)`, and of each layer the queries `(n, heads, dim)`."""

    positions: torch.Tensor
    queries: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True)
class QuerySample:
    """Of one request. The engine thread appends steps; any thread reads those that are whole.

    A `deployments.transfer.jobs.SegmentTail`: the mass is stored behind a segment.
    """

    layers: int
    scale: float
    block_size: int
    kv_heads: int
    on_end: Callable[[], None] = lambda: None
    steps: list[SampledStep] = field(default_factory=list)

    def nbytes(self, num_blocks: int) -> int:
        """See `SegmentTail`."""
        return mass_bytes(self.layers, self.kv_heads, num_blocks * self.block_size)

    def append(self, sealed: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Any:
        """See `SegmentTail`."""
        mass = self.mass(sealed, self.block_size)
        return sealed if mass is None else with_mass(sealed, mass)

    def end(self) -> None:
        """See `SegmentTail`. Sample no more."""
        self.on_end()

    def mass(self, sealed: np.ndarray[tuple[int], np.dtype[np.uint8]], block_size: int) -> Mass | None:
        """The mass of a raw sealed segment; None where no query of the sample has seen all of it."""
        header = read_header(sealed.data)
        layers, _, tokens, _, _ = header.shape
        first = header.start_block * block_size
        steps = [step for step in tuple(self.steps) if len(step.queries) == self.layers == layers]
        if not steps:
            return None
        positions = torch.cat([step.positions for step in steps]).cpu().numpy()
        if int(positions.max()) < first + tokens - 1:
            return None
        kv = np.frombuffer(sealed.data, DTYPES[header.dtype], offset=header.body_offset).reshape(header.shape)
        mass = [
            attention_mass(
                array_of(torch.cat([step.queries[layer] for step in steps]).cpu()),
                positions,
                kv[layer, 0],
                first,
                self.scale,
            )
            for layer in range(layers)
        ]
        return np.stack(mass)
