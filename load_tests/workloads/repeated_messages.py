"""Which messages of a workload come back, at whatever place: of workloads that reuse chunks and not prefixes.

As `load_tests.workloads.prefixes`, for servers that reuse the KV of a message behind others than before. A message is
the same where its role and its text are; answers count nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from load_tests.workloads.workload import Message, Request

RETURNING_SHARE = 0.5
"""Part of a prompt's text that lies in messages that were sent before."""


def mark_returning_messages(requests: Iterable[Request]) -> tuple[Request, ...]:
    """Return the requests, in their order, with `Request.returning` set by their messages."""
    seen: set[Message] = set()
    marked = []
    for request in requests:
        known = sum(_characters(message) for message in request.messages if message in seen)
        whole = sum(map(_characters, request.messages))
        marked.append(replace(request, returning=known >= RETURNING_SHARE * whole))
        seen.update(request.messages)
    return tuple(marked)


def repeated_characters(requests: Iterable[Request]) -> int:
    """Of all messages that at least two requests have, each counted once."""
    uses = Counter(message for request in requests for message in set(request.messages))
    return sum(_characters(message) for message, count in uses.items() if count > 1)


def _characters(message: Message) -> int:
    return len(message.content or "")
