"""Forms in which a tolerant segment may lie in Redis in the place of a dense one, by the tail that came with it."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np

from deployments.segment_store.segment_codecs import Coding
from kvmanager.segments.format import SegmentHeader

FORMS = {"sparse": "deployments.segment_store.sparse.coding"}
"""The module of each, by the name of its codec in a header. Its `build` makes it of a `Coding` and a fingerprint."""


class StoredForm(Protocol):
    """A form of one model's segments. Any thread."""

    def stored(self, key: bytes, sealed: memoryview, tail: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """Return a raw segment in this form; None: it is to be stored dense. Raises SegmentMismatch."""
        ...

    def serves(self, header: SegmentHeader, form: bytes) -> bool:
        """Return whether a segment of this form (`kvmanager.segments.forms`) is of use to this model's engines."""
        ...


def stored_form(coding: Coding, fingerprint: bytes) -> StoredForm | None:
    """Make the form that a coding names; None where all segments are dense."""
    if coding.form is None:
        return None
    made: StoredForm = importlib.import_module(FORMS[coding.form.name]).build(coding, fingerprint)
    return made
