"""Held-out two-hop questions of the probe model, as prompts of documents that are chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from models.training.dialogue import Dialogue, encode
from models.training.probe.evaluate import document_spans
from models.training.probe.prompts import heldout_dialogue
from models.training.tokenizer import ASSISTANT


@dataclass(frozen=True)
class Question:
    """A prompt that ends where its answer begins. `first`: the first question about these documents."""

    ids: list[int]
    chunks: list[range]
    answer: list[int]
    first: bool


def questions(tokenizer: Any, count: int, context: int, seed: int) -> Iterator[Question]:
    """Yield ``count`` questions, up to four after the same documents of about ``context`` tokens, fixed by the seed."""
    mark = tokenizer.get_vocab()[ASSISTANT]
    asked = number = 0
    while asked < count:
        dialogue = heldout_dialogue(seed + number, context)
        number += 1
        for place, turn in enumerate(dialogue.turns[: count - asked]):
            ids, _ = encode(Dialogue(dialogue.system, dialogue.documents, [turn]), tokenizer, frozenset())
            spans = document_spans(ids, tokenizer)
            begin = ids.index(mark, spans[-1][1]) + 1
            answer = tokenizer.encode(turn.answer, add_special_tokens=False)
            yield Question(ids[:begin], [range(*span) for span in spans], answer, place == 0)
            asked += 1
