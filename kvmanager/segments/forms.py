"""A stored segment's form: dense, or sparse with a name for what was kept. Read from heads, so it outlives any index.

A form is empty for a dense segment. For a sparse one it is the header's level, which names the budgets, and the digest
of the table, which covers every section. Another mass keeps other tokens, and gives another form. Pure: any thread.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

from kvmanager.segments.budgets import Budgets
from kvmanager.segments.head import Buffer, bytes_of, read_header, stated_table_digest
from kvmanager.segments.header import SPARSE

DENSE: Final = b""
_LEVEL_BYTES = 2


def stated_form(buffer: Buffer) -> bytes:
    """Return the form that a segment's head states. Raises SegmentMismatch for what is no head."""
    header = read_header(buffer)
    if header.codec != SPARSE:
        return DENSE
    return header.level.to_bytes(_LEVEL_BYTES, "little") + stated_table_digest(bytes_of(buffer))


def serves(form: bytes, budgets: Budgets | None) -> bool:
    """Return whether a copy of this form is of use to a reader with these budgets; None: dense KV only."""
    if form == DENSE:
        return True
    return budgets is not None and form[:_LEVEL_BYTES] == budgets.header_level.to_bytes(_LEVEL_BYTES, "little")


def kept_digest(budgets: Budgets, forms: Sequence[bytes]) -> bytes:
    """Return 32 bytes that name what is kept of a prefix: of the budgets, and of each segment what its form says."""
    digest = hashlib.sha256(b"crosskv-kept" + budgets.digest)
    for form in forms:
        digest.update(len(form).to_bytes(2, "little") + form)
    return digest.digest()
