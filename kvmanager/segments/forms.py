"""A stored segment's form: dense, or one of which no dense segment can be made. Read from heads: it outlives any index.

A form is empty for a dense segment. For another one it is the header's level and the digest of the table, which covers
every section: other contents are another form. Whom a form serves, the extension that made it says. Pure: any thread.
"""

from typing import Final

from kvmanager.segments.head import Buffer, bytes_of, read_header, stated_table_digest

DENSE: Final = b""
LEVEL_BYTES: Final = 2


def stated_form(buffer: Buffer) -> bytes:
    """Return the form that a segment's head states. Raises SegmentMismatch for what is no head."""
    header = read_header(buffer)
    if header.is_dense:
        return DENSE
    return header.level.to_bytes(LEVEL_BYTES, "little") + stated_table_digest(bytes_of(buffer))
