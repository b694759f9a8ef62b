"""Rows of sparse KV: of the stored prefix each layer and head keeps some tokens only, and nothing else is attended to.

A method of its own kind, for what it makes is no whole KV: a masked model reads on after it (`MaskedKV`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deployments.segment_store.sparse.budget_files import KEPT_PROFILE_FILE, find_budgets
from kernels.codecs import CodecProfile, make_codec
from kernels.sparse.section import SparseForm
from kvmanager.extensions.sparse.budgets import LAYERS, UNIFORM, Budgets
from load_tests.blending.forward import Prefill
from load_tests.codec.model import KV_DTYPE, kv_shape
from load_tests.quality.cases import Case
from load_tests.sparse.choices import sparse_kv
from load_tests.sparse.masked_model import MaskedModel

BLOCK_TOKENS = 32
CODED_LEVEL = 2
"""Of CacheGen, on top of a sparse level."""


class MaskedKV(NamedTuple):
    """KV ``(layers, 2, tokens, kv_heads, head_dim)`` of which ``kept (layers, kv_heads, tokens)`` is there."""

    kv: torch.Tensor
    kept: torch.Tensor
    model: MaskedModel

    def continued(self, ids: Sequence[int], stop: int) -> torch.Tensor:
        """(len(ids), vocabulary) logits of reading `ids` after the first `stop` tokens."""
        return self.model.continued(self.kv[:, :, :stop], ids, self.kept[:, :, :stop])


class Masses:
    """The prefix's attention mass of the case in hand; all sparse rows need the same."""

    def __init__(self, model: MaskedModel) -> None:
        self.model = model
        self._of: tuple[int, torch.Tensor] | None = None

    def __call__(self, case: Case, stop: int) -> torch.Tensor:
        """(layers, kv_heads, stop), float32."""
        if self._of is None or self._of[0] != id(case):
            self._of = id(case), self.model.prefix(case.ids[:stop])[1]
        return self._of[1]


class Sparse:
    """The prefix's whole blocks, as budgets keep them, through their bytes."""

    computed = 0.0

    def __init__(self, name: str, masses: Masses, budgets: Budgets, form: SparseForm) -> None:
        self.name = name
        self._masses, self._budgets, self._form = masses, budgets, form
        self._raw_bytes = self._coded_bytes = 0

    def kv(self, model: Any, case: Case, full: Prefill) -> MaskedKV | None:
        """See `load_tests.quality.methods.Method`."""
        stop = case.prefix // BLOCK_TOKENS * BLOCK_TOKENS
        if not stop:
            return None
        stored = full.kv[:, :, :stop].to(KV_DTYPE).contiguous()
        found = sparse_kv(stored, self._masses(case, stop), self._budgets, self._form)
        self._raw_bytes += found.raw_bytes
        self._coded_bytes += found.coded_bytes
        return MaskedKV(found.kv, found.kept, self._masses.model)

    @property
    def bytes_ratio(self) -> float:
        """See `load_tests.quality.methods.Method`."""
        return self._raw_bytes / self._coded_bytes if self._coded_bytes else 1.0


def sparse_methods(folder: Path | str, model: Any) -> list[Sparse]:
    """Every level that the model has, and CacheGen on top of the best one; no row for what cannot be calibrated.

    `model` is for these rows alone: how it attends is changed. Raises ValueError for one that cannot be sparse.
    """
    layers, *heads = kv_shape(model)
    masses = Masses(MaskedModel(model))

    def coded(file: Path) -> SparseForm:
        profile = CodecProfile.from_bytes(file.read_bytes()) if file.is_file() else None
        usable = profile is not None and profile.shape == (layers, *heads)
        generic = CodecProfile.generic((layers, heads[0], heads[1]))
        return SparseForm(make_codec("cachegen", CODED_LEVEL, profile if usable else generic))

    rows = [Sparse(f"sparse {level}", masses, Budgets.uniform(level, layers), SparseForm()) for level in UNIFORM]
    try:
        budgets = find_budgets(str(folder), LAYERS, layers)
    except ValueError:  # it was not measured
        half = Budgets.uniform("50", layers)
        return [*rows, Sparse(f"sparse 50, cachegen {CODED_LEVEL}", masses, half, coded(Path("no profile for it")))]
    own = coded(Path(folder) / KEPT_PROFILE_FILE)
    best = Sparse(f"sparse {LAYERS}", masses, budgets, SparseForm())
    return [best, Sparse(f"sparse {LAYERS}, cachegen {CODED_LEVEL}", masses, budgets, own), *rows]
