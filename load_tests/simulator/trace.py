"""Traces in Mooncake's format: a JSON object per line, one line per request.

Source: Qin et al., *Mooncake: Trading More Storage for Less Computation* (FAST 2025) and the traces published with it.

====================  ==================================================================================
``timestamp``         arrival in milliseconds after the trace's beginning
``input_length``      tokens of the prompt
``output_length``     tokens of the answer
``hash_ids``          one number per block of 512 prompt tokens, the last one partly filled as a rule;
                      equal numbers mean equal blocks after equal prefixes
====================  ==================================================================================

Other fields are ignored, and so are empty lines. Lines that are out of order are put in order of their timestamps,
equal ones in the file's order. Anything else that is not as above is a `TraceError`: a replay of half a trace would
look like a result.
"""

import json
import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from kvmanager.segments.keys import BlockHash

BLOCK_TOKENS = 512
"""Prompt tokens that one of ``hash_ids`` stands for."""

MOST_ID = 2**64 - 1


class TraceRequest(NamedTuple):
    """One request of a trace."""

    timestamp_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """One per block, each naming the block *and all before it*: no number follows two different ones."""


class TraceError(ValueError):
    """A trace that cannot be replayed. One sentence, which names the file and, if there is one, the line."""


def block_key(hash_id: int) -> BlockHash:
    """Return the name of a trace block for the manager: 32 bytes, evenly spread, the same in every process."""
    return BlockHash(blake2b(hash_id.to_bytes(16, "big", signed=True), digest_size=32).digest())


def read_trace(path: Path | str, most_requests: int | None = None) -> list[TraceRequest]:
    """Read a trace, or its first ``most_requests`` lines, in order of arrival. Raises TraceError."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            requests = list(islice(_requests(path, file), most_requests))
    except OSError as error:
        raise TraceError(f"{path} cannot be read ({error.strerror}).") from None
    if not requests:
        raise TraceError(f"{path} has no requests.")
    requests.sort(key=lambda request: request.timestamp_s)
    return _with_prefix_ids(requests)


def _requests(path: Path, lines: Iterator[bytes] | Any) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        if not line.isspace():
            try:
                yield _request(line)
            except _InvalidLineError as error:
                raise TraceError(f"{path}, line {number}: {error}.") from None


class _InvalidLineError(Exception):
    pass


def _request(line: bytes) -> TraceRequest:
    try:
        fields = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise _InvalidLineError("not a JSON object") from None
    if not isinstance(fields, dict):
        raise _InvalidLineError("not a JSON object")
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in fields:
            raise _InvalidLineError(f"the field {name} is missing")
    timestamp, hash_ids = fields["timestamp"], fields["hash_ids"]
    if type(timestamp) not in (int, float) or not 0 <= timestamp < math.inf or timestamp > MOST_ID:
        raise _InvalidLineError(f"timestamp must be a number of milliseconds from 0 on, got {_shown(timestamp)}")
    if not isinstance(hash_ids, list) or not hash_ids:
        raise _InvalidLineError(f"hash_ids must be a list of at least one block, got {_shown(hash_ids)}")
    for hash_id in hash_ids:
        if type(hash_id) is not int or not 0 <= hash_id <= MOST_ID:
            raise _InvalidLineError(f"hash_ids must be whole numbers from 0 to 2**64 - 1, got {_shown(hash_id)}")
    return TraceRequest(
        timestamp / 1000, _length(fields, "input_length", 1), _length(fields, "output_length", 0), tuple(hash_ids)
    )


def _length(fields: dict[str, Any], name: str, least: int) -> int:
    length = fields[name]
    if type(length) is not int or not least <= length <= MOST_ID:
        raise _InvalidLineError(f"{name} must be a whole number of tokens, at least {least}, got {_shown(length)}")
    return length


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _with_prefix_ids(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Give a number that follows different ones a different name in each place but the first: below zero.

    The published traces number prefixes, so nothing changes there. Where a trace numbers the contents of blocks alone,
    equal blocks after unequal prefixes have unequal KV, and must not be taken for one.
    """
    previous: dict[int, int | None] = {}
    renamed: dict[tuple[int | None, int], int] = {}
    result: list[TraceRequest] = []
    for request in requests:
        names: list[int] = []
        before: int | None = None
        for hash_id in request.hash_ids:
            if previous.setdefault(hash_id, before) == before:
                before = hash_id
            else:
                before = renamed.setdefault((before, hash_id), -1 - len(renamed))
            names.append(before)
        result.append(request._replace(hash_ids=tuple(names)))
    return result
