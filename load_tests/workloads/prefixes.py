"""Which text of a workload comes back: for `Request.returning`, and for the size of the working set.

A request's *sequence* is what the server then holds KV of: its messages and its answer. An answer's text is not known
before it is given; its place holder is named after the session and the place, and as long as the answer may be. Every
sequence is compared with the others as text, character by character, so nothing here depends on how a workload was
made. Among sorted sequences, the longest common prefix with any other is the one with a neighbour.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from load_tests.workloads.repeated_messages import repeated_characters
from load_tests.workloads.workload import Message, Request, Workload

RETURNING_SHARE = 0.5
"""Part of a prompt's text that must have been sent before. A system prompt that all prompts have before a long
document of their own does not make a request a returning one; the document does."""


def mark_returning(requests: Iterable[Request], characters_per_token: float) -> tuple[Request, ...]:
    """Return the requests, in their order, with `Request.returning` set."""
    marked: list[Request] = []
    earlier: list[tuple[str, ...]] = []
    texts = _Texts(characters_per_token)
    for request in requests:
        prompt = texts.prompt(request)
        place = bisect.bisect(earlier, prompt)
        shared = max((common_prefix(prompt, other) for other in earlier[max(0, place - 1) : place + 1]), default=0)
        marked.append(replace(request, returning=shared >= RETURNING_SHARE * sum(map(len, prompt))))
        bisect.insort(earlier, texts.sequence(request))
    return tuple(marked)


def working_set_tokens(workload: Workload) -> int:
    """Tokens, each counted once, whose KV at least two of the workload's requests can use.

    A cache smaller than that must compute some of them twice, whatever it evicts.
    """
    if workload.reuse == "messages":
        return round(repeated_characters(workload.requests) / workload.characters_per_token)
    texts = _Texts(workload.characters_per_token)
    sequences = sorted(texts.sequence(request) for request in workload.requests)
    characters = before = 0
    for left, right in itertools.pairwise(sequences):
        shared = common_prefix(left, right)
        # What the pair to the left shares as well has been counted there.
        characters += max(0, shared - before)
        before = shared
    return round(characters / workload.characters_per_token)


def common_prefix(left: Sequence[str], right: Sequence[str]) -> int:
    """Characters with which both begin."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            return length + _common_characters(one, other)
        length += len(one)
    return length


def _common_characters(one: str, other: str) -> int:
    """By bisection: comparing slices takes no step of the interpreter per character."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class _Texts:
    """Messages as texts. One object for equal ones: equal objects are compared without looking at the characters."""

    def __init__(self, characters_per_token: float) -> None:
        self._characters_per_token = characters_per_token
        self._texts: dict[Message, str] = {}
        self._answers: dict[tuple[str, int], str] = {}

    def prompt(self, request: Request) -> tuple[str, ...]:
        return tuple(self._text(request, place) for place in range(len(request.messages)))

    def sequence(self, request: Request) -> tuple[str, ...]:
        return (*self.prompt(request), self._answer(request.session, len(request.messages), request.max_tokens))

    def _text(self, request: Request, place: int) -> str:
        message = request.messages[place]
        if message.content is None:
            # The request that it answers came before and left the place holder; its length is that one's.
            return self._answer(request.session, place, request.max_tokens)
        if message not in self._texts:
            self._texts[message] = f"\n{message.role}\n{message.content}"
        return self._texts[message]

    def _answer(self, session: str, place: int, max_tokens: int) -> str:
        if (session, place) not in self._answers:
            text = f"\nassistant\n\0{session}\0{place}\0"
            self._answers[session, place] = text.ljust(round(max_tokens * self._characters_per_token), "\0")
        return self._answers[session, place]
