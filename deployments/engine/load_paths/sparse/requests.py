"""Requests with a sparse prefix in vLLM's scheduler: they enter, load or wait, fall back to an ordinary one, and leave.

Leans on vLLM, `Request`: `cache_salt`, `block_hashes`, `update_block_hashes` (which names all blocks that have no hash
yet) and `skip_reading_prefix_cache`. While a connector answers None vLLM forgets what it found on the device and asks
again in its next step. On the engine thread, but for `write`.

States of a prefix, each time vLLM asks how much there is to load:

    the device has all of it         nothing to load; `SparsePresenter` presents it
    the device has a part of it      the part leaves the prefix cache, and vLLM asks again: a load brings all or nothing
    another request is loading it    wait (`deployments.transfer.shared_loads`)
    none is here                     load all of it, once; a preempted request does so too
    it did not come, or never will   *plain*: the request takes its plain names back, is asked for again, and is an
                                     ordinary request from then on, computed and saved under those names
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from msgspec import ValidationError

from deployments.engine.load_paths.sparse.prefix import PlannedPrefix, planned_prefix, why_not_prefix
from deployments.engine.load_paths.sparse.presenter import SparsePresenter
from deployments.protocol.engine_hints import extra, hints_of
from kernels.paged.gather_scatter import scatter
from kernels.paged.layout import PagedLayout
from kvmanager.extensions.sparse.retained_prefixes import SPARSE, PlannedSparse
from kvmanager.moves.plan import Plan, PlannedLoad
from kvmanager.segments.mismatch import MismatchReason, SegmentMismatch

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from deployments.engine.pool.control import PoolControl

logger = logging.getLogger(__name__)

OpenKept: TypeAlias = Callable[[memoryview, PlannedLoad, bytes], Sequence[tuple[torch.Tensor, torch.Tensor]]]
"""From the stored bytes of a segment of a sparse prefix, and its expected form (`kvmanager.segments.forms`), to each
layer's kept keys and values, `(tokens, kv_heads, head_dim)` each. Verifies them; raises SegmentMismatch. From any load
thread."""


@dataclass(frozen=True)
class RetainedSlots:
    """Writes kept keys and values into the right-aligned slots of vLLM's cache. Any thread; one per block.

    `layers` are vLLM's per-layer tensors, in layer order.
    """

    layers: Sequence[torch.Tensor]
    layout: PagedLayout

    def write(self, block_ids: Sequence[int], layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write kept tokens of one layer into `block_ids`, in their order, and into no other block.

        `keys` and `values` are `(tokens, kv_heads, head_dim)`, `tokens` those of the blocks; keys have the rotary phase
        of their own places. Row i may be another token in each head: head h's rows are its own kept tokens, in order.
        Raises ValueError, before anything is written, for what does not fit.
        """
        expected = self.layout.segment_shape(1, len(block_ids))[2:]
        if keys.shape != expected or values.shape != expected:
            raise ValueError(f"{len(block_ids)} blocks keep {expected}, not {tuple(keys.shape)}, {tuple(values.shape)}")
        if block_ids:
            scatter([self.layers[layer]], block_ids, self.layout, torch.stack((keys, values))[None])


class SparseRequests:
    """See the module's docstring."""

    def __init__(
        self,
        presenter: SparsePresenter,
        slots: RetainedSlots,
        open_kept: OpenKept,
        control: PoolControl,
        block_size: int,
        on_plain: Callable[[], None],
    ) -> None:
        """`on_plain` hears of every request that came for a sparse prefix and is an ordinary one instead."""
        self._presenter = presenter
        self._slots = slots
        self._open_kept = open_kept
        self._control = control
        self._on_plain = on_plain
        self._has_been_plain = False
        self._block_size = block_size

    def enter(self, request: Request, plan: Plan | None) -> PlannedPrefix | None:
        """The request begins with a sparse prefix, and has its names; None: it cannot, for the plan is not sound."""
        if request.skip_reading_prefix_cache or not request.block_hashes:
            return None  # it wants something of each token of its prompt
        try:
            planned = extra(plan, SPARSE, PlannedSparse)
            prefix = planned_prefix(planned) if planned is not None else None
        except (ValueError, TypeError, IndexError, ValidationError):
            return None
        if prefix is None:
            return None
        if why_not_prefix(prefix.prefix, len(self._slots.layers), self._block_size, request.num_prompt_tokens):
            return None
        self._presenter.enter(request.request_id, prefix.prefix.blocks, prefix.prefix.kept)
        self._control.never_save(bytes(request.block_hashes[0]))
        return prefix

    def leave(self, request_id: str) -> None:
        """The request has ended, or is plain from now on."""
        self._presenter.leave(request_id)

    def make_plain(self, request: Request, why: str) -> None:
        """A request that came for a sparse prefix is an ordinary one from now on."""
        make_plain(request)
        self._on_plain()
        if not self._has_been_plain:
            self._has_been_plain = True
            logger.warning("a request goes without its sparse prefix: %s (counted, logged once)", why)

    def write(self, planned: PlannedPrefix, block_ids: Sequence[int], sealed: memoryview, load: PlannedLoad) -> None:
        """Write what is stored of one segment into its slots of all the prefix's `block_ids`. From a load thread.

        Raises SegmentMismatch, before anything is written, when it is not what the plan says.
        """
        number = planned.loads.index(load)
        kept, slots = planned.kept[number], planned.slots[number]
        opened = self._open_kept(sealed, load, planned.forms[number])
        layout = self._slots.layout
        shapes = [(count * self._block_size, layout.num_kv_heads, layout.head_dim) for count in kept]
        if [(tuple(k.shape), tuple(v.shape)) for k, v in opened] != [(shape, shape) for shape in shapes]:
            raise SegmentMismatch(MismatchReason.SHAPE)
        if any(part.dtype is not layout.dtype for layer in opened for part in layer):
            raise SegmentMismatch(MismatchReason.DTYPE)
        for layer, (keys, values) in enumerate(opened):
            self._slots.write(block_ids[slots[layer] : slots[layer] + kept[layer]], layer, keys, values)

    def forget(self, request: Request, blocks: int) -> None:
        """Take the leading blocks of a prefix whose rest has left the device out of the prefix cache."""
        self._control.forget(request.block_hashes[:blocks])


def make_plain(request: Request) -> None:
    """Give a request that has no blocks the names that its prompt has without a sparse prefix. O(tokens)."""
    request.cache_salt = hints_of(request.kv_transfer_params).plain_salt
    request.block_hashes.clear()
    request.update_block_hashes()
