"""What a workload is: requests, when each may be sent, and which of them begin as an earlier one did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str | None
    """None, for the role ``assistant`` only, stands for what the server answered in that place."""


@dataclass(frozen=True)
class Request:
    """One request; it may be sent when `at_s` has come *and* `after` has ended."""

    number: int
    """Its place in `Workload.requests`, from 0."""
    session: str
    """Requests of one session belong to one conversation."""
    at_s: float
    """Earliest time to send it, in seconds since the workload began."""
    after: int | None
    """The number of the request that must have ended first: an earlier one, of the same session or document."""
    messages: tuple[Message, ...]
    max_tokens: int
    """Tokens of the answer; the benchmarks ask for exactly this many."""
    returning: bool = False
    """At least half of its prompt's text was sent, or answered, by this workload before: `prefixes.mark_returning`, or
    `repeated_messages.mark_returning_messages`."""


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their numbers, which is that of `Request.at_s`."""

    name: str
    requests: tuple[Request, ...]
    concurrency: int | None
    """Most requests under way at a time, sent in the order of their numbers; None: an open loop, requests go out when
    their time has come."""
    characters_per_token: float = 5.0
    """Of the texts in the messages, as the tokenizer cut them; turns lengths of text into tokens."""
    reuse: Literal["prefixes", "messages"] = "prefixes"
    """What of it comes back: beginnings of prompts, or messages at whatever place."""
