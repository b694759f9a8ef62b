"""What the streams of a trial ask, and whose KV is stored before they do.

Plain prompts are asked again and again, and it is their own KV that is stored. A blended prompt's documents are what is
stored, each as the exact prompt that it is alone; and each phase of a trial has the documents in orders of its own, for
a prompt that came before would find itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

PROMPT_TOKENS = 900
QUIET, STRUCK, UNDER, AFTER = "before", "when it struck", "under it", "after it"
PHASES = (QUIET, STRUCK, UNDER, AFTER)
DOCUMENTS, CHUNKS = 10, 4
"""How many there are, and how many of them stand in a prompt."""
CHUNK_TOKENS, OPENING_TOKENS, QUESTION_TOKENS = (150, 230), (8, 40), (20, 60)
DOCUMENT_TOKEN = "<|doc|>"
"""The demo model's: what a chunk begins with there, by default."""


@dataclass(frozen=True)
class TrialPrompts:
    """Token ids. `stored` is what is parked: the prompts themselves, or, of `blended` ones, their documents."""

    by_phase: dict[str, list[list[int]]]
    stored: list[list[int]]
    blended: bool = False

    def body(self, ratio: float) -> dict[str, Any]:
        """Return what a request carries besides its prompt; `ratio` of what is blended is recomputed."""
        return {"kv_cache": {"fidelity": "blended", "recompute_ratio": ratio}} if self.blended else {}


def plain_prompts(words: Sequence[int], streams: int) -> TrialPrompts:
    """The same prompts in each phase, with no token in common."""
    prompts = [list(words[number * PROMPT_TOKENS : (number + 1) * PROMPT_TOKENS]) for number in range(streams)]
    return TrialPrompts(dict.fromkeys(PHASES, prompts), prompts)


def chunked_prompts(rng: Random, words: Sequence[int], separator: int, streams: int) -> TrialPrompts:
    """Documents of random lengths in ever new orders, behind openings and before questions of their own."""

    def drawn(lengths: tuple[int, int]) -> list[int]:
        size = rng.randint(*lengths)
        start = rng.randrange(len(words) - size)
        return list(words[start : start + size])

    documents = [[separator, *drawn(CHUNK_TOKENS)] for _ in range(DOCUMENTS)]
    by_phase: dict[str, list[list[int]]] = {}
    for phase in PHASES:
        by_phase[phase] = []
        for _ in range(streams):
            chosen = rng.sample(documents, CHUNKS)
            inner = [token for document in chosen for token in document]
            # The question begins as a document does, which ends the last one; it is too short to be a chunk.
            by_phase[phase].append([*drawn(OPENING_TOKENS), *inner, separator, *drawn(QUESTION_TOKENS)])
    return TrialPrompts(by_phase, documents, blended=True)


def document_token(model_folder: Path) -> int:
    """The id of `DOCUMENT_TOKEN`. Raises ValueError where the model has none."""
    added = json.loads((model_folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    for token in added:
        if token["content"] == DOCUMENT_TOKEN:
            return int(token["id"])
    raise ValueError(f"the model in {model_folder} has no token {DOCUMENT_TOKEN}")
