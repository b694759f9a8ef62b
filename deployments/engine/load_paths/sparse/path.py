"""Sparse: a request that begins with a sparse prefix, which is brought whole or not at all (README.md).

The request has the prefix's names from its entry on. Where it cannot have the prefix it takes its plain names back, and
is an ordinary request of the paths behind this one. This path keeps a state of it as long as it is sparse.

Leans on vLLM's `GPUModelRunner`: `compilation_config.static_forward_context`, its attention layers by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from prometheus_client.core import CounterMetricFamily, Metric

from configs.settings import Settings
from deployments.engine.load_paths.base import WAIT, Ask, LoadPath, Proposal
from deployments.engine.load_paths.sparse.prefix import PlannedPrefix
from deployments.engine.load_paths.sparse.presenter import SparsePresenter
from deployments.engine.load_paths.sparse.queries import QueryWatch
from deployments.engine.load_paths.sparse.refusals import why_not, why_not_built
from deployments.engine.load_paths.sparse.requests import OpenKept, RetainedSlots, SparseRequests, make_plain
from deployments.engine.tracked_request import TrackedRequest
from deployments.protocol.engine_hints import EngineHints
from deployments.segment_store.segment_codecs import CACHEGEN, RAW_CODING, Coding, FormLevel
from deployments.segment_store.sparse.coding import SparseCoding
from kvmanager.extensions.sparse.budgets import Budgets
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.keys import TOLERANT

if TYPE_CHECKING:
    from deployments.engine.load_paths.parts import EngineParts
    from deployments.transfer.segment_copy import SegmentCopier
    from kernels.dtypes import Array

logger = logging.getLogger(__name__)


class SparsePath(LoadPath):
    """See the module's docstring. `terms`: the budgets of what is presented here; None: nothing is."""

    needs_state = True

    def __init__(self, parts: EngineParts) -> None:
        self.requests: SparseRequests | None = None
        """None: the engine presents no prefix, and all requests are ordinary ones."""
        self.queries: QueryWatch | None = None
        """What tolerant prompts' attention mass is made of; None: nothing is stored sparse."""
        self.lost = 0
        """Requests that went without the sparse prefix that they were planned with."""
        self.terms: Budgets | None = None
        self._parts = parts
        self._begin()

    def _begin(self) -> None:
        parts = self._parts
        if parts.settings.kv.redis_form is None:
            return
        coding = sparse_coding(parts.settings, parts.fingerprint)
        budgets = coding.budgets(len(parts.copier.layers))
        if budgets is None:
            return
        why = self.accept(opener(coding, parts.copier))
        if why is not None:
            logger.warning("KV is stored dense, for this engine cannot present it sparse: %s", why)
            return
        self.terms, self.queries = budgets, parts.loop.call(self._watch).result()

    def _watch(self) -> QueryWatch:
        runner, names = self._parts.loop.runner, self._parts.layer_names
        layers = runner.compilation_config.static_forward_context
        return QueryWatch(runner, [layers[name] for name in names], self._parts.block_size)

    def accept(self, open_kept: OpenKept) -> str | None:
        """Present sparse prefixes from now on, opened by `open_kept`. Returns why the engine cannot, if it cannot."""
        parts, runner = self._parts, self._parts.loop.runner
        why = why_not(parts.config) or why_not_built(runner)
        if why is not None:
            return why
        presenter = SparsePresenter(runner, parts.layer_names, parts.block_size)
        slots = RetainedSlots(parts.copier.layers, parts.copier.layout)
        requests = SparseRequests(presenter, slots, open_kept, parts.control, parts.block_size, self._count_lost)

        def accept() -> None:
            self.requests = requests

        parts.loop.call(accept).result()
        return None

    def entered(self, request: TrackedRequest, hints: EngineHints) -> None:
        """See `LoadPath`. What has a sparse prefix is not saved, and needs no mass.

        A request that came under the names of a sparse prefix (`EngineHints.plain_salt`) and cannot have it must not
        keep them: what it computes would be taken for the prefix.
        """
        tolerates = hints.fidelity == TOLERANT
        if hints.plain_salt is not None:
            prefix = self._enter(request, hints, tolerates)
            if prefix is not None:
                request.state[self] = prefix
                request.plan.become(prefix.loads, request.plan.lease_id)
                request.saving.never()
                return
        if self.queries is not None and tolerates:
            request.saving.put_behind(self.queries.watch(request.request.request_id))

    def _enter(self, request: TrackedRequest, hints: EngineHints, tolerates: bool) -> PlannedPrefix | None:
        if self.requests is None:
            make_plain(request.request)
            return None
        prefix = self.requests.enter(request.request, hints.plan) if tolerates else None
        if prefix is None:
            self.requests.make_plain(request.request, "its plan is not sound")
        return prefix

    def propose(self, request: TrackedRequest, first_block: int) -> Ask:
        """See `LoadPath`, and the states of a prefix (`deployments.engine.load_paths.sparse.requests`)."""
        planned: PlannedPrefix | None = request.state.get(self)
        if planned is None or self.requests is None:
            return None
        end = planned.prefix.blocks
        if first_block >= end:
            return Proposal(self, first_block)
        if request.wait.was_in_vain or not request.plan.loads:
            self.requests.leave(request.request.request_id)
            self.requests.make_plain(request.request, "its segments did not come")
            del request.state[self]
            request.start_over()
            return WAIT
        if first_block:
            self.requests.forget(request.request, first_block)
            return WAIT
        return Proposal(self, end)

    def start(
        self,
        request: TrackedRequest,
        block_ids: Sequence[int],
        proposal: Proposal,
        ended: Callable[[TrackedRequest, int], None],
    ) -> None:
        """See `LoadPath`."""
        assert self.requests is not None
        job, give_up_at = self._parts.whole.job(request, block_ids)
        write = partial(self.requests.write, request.state[self], job.block_ids)
        self._parts.transfer.submit_load(replace(job, cutoff=None, write=write), give_up_at)

    def left(self, request: TrackedRequest) -> None:
        """See `LoadPath`."""
        if self.requests is not None:
            self.requests.leave(request.request.request_id)

    def families(self) -> Iterable[Metric]:
        """See `LoadPath`."""
        return (lost_family(self.lost),)

    def _count_lost(self) -> None:
        self.lost += 1


def build(parts: EngineParts) -> SparsePath:
    """Return the path of an engine. It is there for requests with names of a prefix even if none is presented."""
    return SparsePath(parts)


def lost_family(requests: int) -> Metric:
    """How many requests went without the sparse prefix that they were planned with, since start."""
    text = "Requests that went without the sparse prefix of their plan."
    return CounterMetricFamily("crosskv_sparse_lost", text, value=requests)


def sparse_coding(settings: Settings, fingerprint: bytes) -> SparseCoding:
    """Return a replica's coding: the same as its Redis tier's."""
    kv = settings.kv
    form = FormLevel(*kv.redis_form) if kv.redis_form is not None else None
    coding = Coding(RAW_CODING.exact, CACHEGEN, kv.tolerant_level, form=form, model=settings.model_source)
    return SparseCoding(coding, fingerprint)


def opener(coding: SparseCoding, copier: SegmentCopier) -> OpenKept:
    """Return what opens stored segments of the engine whose KV cache `copier` knows: verified, from any load thread."""

    def open_kept(sealed: memoryview, load: PlannedLoad, form: bytes) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        shape, dtype = copier.form_of(load.num_blocks)
        opened = coding.open(sealed, key=load.key, form=form, shape=shape, dtype=dtype, num_blocks=load.num_blocks)
        return [(_tensor(keys, copier.layout.dtype), _tensor(values, copier.layout.dtype)) for keys, values in opened]

    return open_kept


def _tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype)
