"""Stored segments of a sparse prefix, opened for the engine: verified arrays as tensors. From any load thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from configs.settings import Settings
from deployments.engine.load_paths.sparse.requests import OpenKept
from deployments.segment_store.segment_codecs import CACHEGEN, RAW_CODING, Coding, FormLevel
from deployments.segment_store.sparse.coding import SparseCoding
from kvmanager.moves.plan import PlannedLoad

if TYPE_CHECKING:
    from deployments.transfer.segment_copy import SegmentCopier
    from kernels.dtypes import Array


def sparse_coding(settings: Settings, fingerprint: bytes) -> SparseCoding:
    """That of a replica: the same as its Redis tier's."""
    kv = settings.kv
    form = FormLevel(*kv.redis_form) if kv.redis_form is not None else None
    coding = Coding(RAW_CODING.exact, CACHEGEN, kv.tolerant_level, form=form, model=settings.model_source)
    return SparseCoding(coding, fingerprint)


def opener(coding: SparseCoding, copier: SegmentCopier) -> OpenKept:
    """Opens segments of the engine whose KV cache `copier` knows."""

    def open_kept(sealed: memoryview, load: PlannedLoad, form: bytes) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        shape, dtype = copier.form_of(load.num_blocks)
        opened = coding.open(sealed, key=load.key, form=form, shape=shape, dtype=dtype, num_blocks=load.num_blocks)
        return [(_tensor(keys, copier.layout.dtype), _tensor(values, copier.layout.dtype)) for keys, values in opened]

    return open_kept


def _tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype)
