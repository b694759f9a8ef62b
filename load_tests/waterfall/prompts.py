"""What is asked: prompts of random lengths, so that none ends where a block or a segment does. Nothing is sent here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from load_tests.workloads import Words

TINY_TOKENS = (30, 60)
LONG_TOKENS = (1_700, 2_300)
QUESTION_TOKENS = (10, 120)
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Asked:
    """A system message, empty for none, and a question."""

    document: str
    question: str

    def body(self, model: str) -> dict[str, Any]:
        """Of a request for a streamed answer of exactly `ANSWER_TOKENS`."""
        messages = [{"role": "system", "content": self.document}] if self.document else []
        return {
            "model": model,
            "messages": [*messages, {"role": "user", "content": self.question}],
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def tiny(rng: random.Random, text: Words, count: int) -> list[Asked]:
    """Prompts that no two of share a beginning worth anything."""
    return [Asked("", text(rng, rng.randint(*TINY_TOKENS))) for _ in range(count)]


def documents(rng: random.Random, text: Words, count: int) -> list[str]:
    """Texts that come back."""
    return [text(rng, rng.randint(*LONG_TOKENS)) for _ in range(count)]


def questions(rng: random.Random, text: Words, about: Sequence[str]) -> list[Asked]:
    """A new question about each."""
    return [Asked(document, text(rng, rng.randint(*QUESTION_TOKENS))) for document in about]
