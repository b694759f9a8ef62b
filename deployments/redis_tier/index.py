"""What lies in Redis, read anew for each of its lives: the headers, not the payloads."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.segment_store.endpoint import RedisEndpoint, open_store
from deployments.segment_store.sparse.coding import SparseCoding
from kvmanager.segments.format import SegmentHeader
from kvmanager.segments.forms import DENSE, serves
from kvmanager.segments.keys import SegmentKey


@dataclass(frozen=True, slots=True)
class RedisIndex:
    """`headers` are ordered by start block, so parents come first."""

    headers: list[SegmentHeader]
    unusable: list[bytes]
    forms: dict[SegmentKey, bytes]
    """Of sparse ones (`kvmanager.segments.forms`)."""


def read_index(endpoint: RedisEndpoint) -> RedisIndex:
    """Scan Redis; blocks for as long as that takes. Raises StoreUnavailableError.

    A sparse segment is unusable where `kv.sparse` or the model's budgets have become others: no replica presents it,
    and it would keep what is dense from being copied there.
    """
    sparse = SparseCoding(endpoint.coding, endpoint.fingerprint)
    headers: list[SegmentHeader] = []
    unusable: list[bytes] = []
    forms: dict[SegmentKey, bytes] = {}
    for chunk in open_store(endpoint).scan():
        unusable += chunk.unusable
        forms |= chunk.forms
        for header in chunk.headers:
            form = chunk.forms.get(SegmentKey(header.key), DENSE)
            if form == DENSE or serves(form, sparse.budgets(header.shape[0])):
                headers.append(header)
            else:
                unusable.append(header.key)
    headers.sort(key=lambda header: header.start_block)
    return RedisIndex(headers, unusable, forms)
