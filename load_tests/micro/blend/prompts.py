"""Prompts of documents in an order that no other one has, behind beginnings that no other one has.

A short system prompt of its own stands before each prompt's documents. So nothing is a prefix of anything: what is
reused is reused by blending, and an exact prompt with the same documents is computed whole. A document is a message,
which the synthetic models' template begins with a special token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from load_tests.workloads import Words

Message = dict[str, str]
SEPARATOR = "<|im_start|>"
"""What a message begins with in the template of `load_tests.harness.models`."""
CHUNKS = 6
DOCUMENT_TOKENS = (424, 600)
"""Drawn between these: 512 in the mean."""
SYSTEM_TOKENS, QUESTION_TOKENS = (12, 24), (20, 60)


class Prompts:
    """Equal seeds give equal prompts. `longest_tokens` bounds a prompt with all its documents."""

    def __init__(
        self, seed: str, text: Words, chunks: int = CHUNKS, lengths: tuple[int, int] = DOCUMENT_TOKENS
    ) -> None:
        self._rng = random.Random(seed)
        self._text = text
        self._chunks, self._lengths = chunks, lengths

    def documents(self) -> list[Message]:
        """New ones, of random lengths."""
        return [self._message("user", self._lengths) for _ in range(self._chunks)]

    def prompt(self, documents: Sequence[Message]) -> list[Message]:
        """All of them in a random order, with a beginning and a question of its own."""
        order = self._rng.sample(list(documents), len(documents))
        return [self._message("system", SYSTEM_TOKENS), *order, self._message("user", QUESTION_TOKENS)]

    def alone(self) -> list[Message]:
        """A short prompt without documents."""
        return [self._message("system", SYSTEM_TOKENS), self._message("user", QUESTION_TOKENS)]

    def _message(self, role: str, lengths: tuple[int, int]) -> Message:
        return {"role": role, "content": self._text(self._rng, self._rng.randint(*lengths))}
