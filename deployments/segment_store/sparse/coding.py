"""How tolerant segments become sparse on their way to Redis, and how a replica opens them again: one model's budgets.

Writer and reader find the same budgets and codecs by themselves: next to the model's weights, and else by its shape.
The names in a segment's header say whether they did. Any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deployments.segment_store.segment_codecs import CACHEGEN, Coding
from deployments.segment_store.sparse.budget_files import KEPT_PROFILE_FILE, find_budgets
from deployments.segment_store.sparse.segments import mass_of, open_sparse, sparsified
from kernels.dtypes import DTYPES
from kvmanager.extensions.sparse.budgets import LAYERS, Budgets
from kvmanager.extensions.sparse.retained_prefixes import serves
from kvmanager.segments.format import MismatchReason, SegmentHeader, SegmentMismatch, Shape, open_layers, read_header
from kvmanager.segments.forms import DENSE, stated_form
from kvmanager.segments.keys import TOLERANT

if TYPE_CHECKING:
    from kernels.codecs import Codec
    from kernels.dtypes import Array

logger = logging.getLogger(__name__)

_MOST_PROFILE_BYTES = 16 << 20


class SparseCoding:
    """See the module's docstring. The level of `coding.form` is one of `kvmanager.extensions.sparse.budgets`."""

    def __init__(self, coding: Coding, fingerprint: bytes) -> None:
        self._coding = coding
        self._fingerprint = fingerprint
        self._budgets: dict[int, Budgets | None] = {}
        self._inner: dict[tuple[str, int, int, int, int], Codec | None] = {}
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def budgets(self, layers: int) -> Budgets | None:
        """Return the budgets of a model with `layers` layers; None where nothing is stored sparse, logged once."""
        if self._coding.form is None:
            return None
        with self._lock:
            if layers not in self._budgets:
                try:
                    self._budgets[layers] = find_budgets(self._coding.model, self._coding.form.level, layers)
                except ValueError as error:
                    self._budgets[layers] = None
                    logger.warning("KV is stored dense: %s", error)
            return self._budgets[layers]

    def stored(self, key: bytes, sealed: memoryview, tail: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """A raw segment as a sparse one by its mass, if it is to be one, and is smaller so. Raises SegmentMismatch."""
        header = read_header(sealed)
        mass = mass_of(tail, header.shape)
        budgets = None if mass is None else self.budgets(header.shape[0])
        if mass is None or budgets is None or header.fidelity != TOLERANT:
            return None
        name, level = self._coding.tolerant, self._coding.level if self._coding.tolerant == CACHEGEN else 0
        try:
            inner = self._inner_of(name, level, header.shape)
            sparse = sparsified(sealed, key=key, fingerprint=self._fingerprint, mass=mass, budgets=budgets, inner=inner)
        except ValueError as error:  # a codec that does not take this model's KV
            self._say_once(f"segments are stored dense, for they cannot be made sparse: {error}")
            return None
        return sparse if len(sparse) < len(sealed) else None

    def serves(self, header: SegmentHeader, form: bytes) -> bool:
        """Whether a sparse segment of this form was made by this model's budgets."""
        return serves(form, self.budgets(header.shape[0]))

    def open(
        self, sealed: memoryview, *, key: bytes, form: bytes, shape: Shape, dtype: str, num_blocks: int
    ) -> list[tuple[Array, Array]]:
        """Each layer's kept keys and values of a segment of this form, all verified; of a dense one all of them.

        Raises SegmentMismatch for everything else, another form of the same segment too.
        """
        if form == DENSE:
            layers = open_layers(
                sealed, key=key, fingerprint=self._fingerprint, shape=shape, dtype=dtype, num_blocks=num_blocks
            )
            dense = [
                np.frombuffer(layers.layer(number), DTYPES[dtype]).reshape(shape[1:]) for number in range(shape[0])
            ]
            return [(kv[0], kv[1]) for kv in dense]
        budgets = self.budgets(shape[0])
        if budgets is None or stated_form(sealed) != form:
            raise SegmentMismatch(MismatchReason.CODEC)
        opened = open_sparse(
            sealed,
            key=key,
            fingerprint=self._fingerprint,
            shape=shape,
            dtype=dtype,
            num_blocks=num_blocks,
            budgets=budgets,
            inner_codec=lambda name, level, profile: self._inner_of(name, level, shape),
        )
        return [(layer.keys, layer.values) for layer in opened]

    def _inner_of(self, name: str, level: int, shape: Sequence[int]) -> Codec | None:
        """The codec inside. Raises ValueError where there is none such."""
        from kernels.codecs import make_codec  # numba: not for a worker that stores raw segments only

        layers, _, _, heads, dim = shape
        made = name, level, layers, heads, dim
        with self._lock:
            if made not in self._inner:
                profile = self._profile(layers, heads, dim) if name == CACHEGEN else None
                self._inner[made] = None if name == "raw" else make_codec(name, level, profile)
            return self._inner[made]

    def _profile(self, layers: int, heads: int, dim: int) -> Any:
        """CacheGen's profile for what the model's budgets keep, where it was measured; else a generic one."""
        from kernels.codecs import CodecProfile

        path = Path(self._coding.model) / KEPT_PROFILE_FILE
        if (
            self._coding.form is not None
            and self._coding.form.level == LAYERS
            and path.is_file()
            and path.stat().st_size <= _MOST_PROFILE_BYTES
        ):
            try:
                profile = CodecProfile.from_bytes(path.read_bytes())
            except (OSError, ValueError) as error:
                logger.warning("%s is no codec profile, and is not used: %s", path, error)
            else:
                if profile.shape == (layers, heads, dim):
                    return profile
        return CodecProfile.generic((layers, heads, dim))

    def _say_once(self, what: str) -> None:
        with self._lock:
            first = what not in self._said
            self._said.add(what)
        if first:
            logger.warning("%s (logged once)", what)


def build(coding: Coding, fingerprint: bytes) -> SparseCoding:
    """Make the form of one model's segments: `deployments.segment_store.stored_form`."""
    return SparseCoding(coding, fingerprint)
