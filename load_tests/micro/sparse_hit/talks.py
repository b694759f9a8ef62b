"""Documents with questions behind them: what is stored, and what is asked of it.

Of the demo model they are held-out worlds, and every answer is known. Models with random weights get common words:
their answers are noise, so nothing is right or wrong there, only equal or not.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from load_tests.workloads import Words
from models.training.dialogue import Dialogue
from models.training.evaluate import MEASURED_KINDS, heldout_dialogue

SHORTEST_SHARE = 0.8
"""Of the longest documents: lengths are drawn."""
QUESTION_TOKENS = (20, 40)


@dataclass(frozen=True)
class Talk:
    """Chat requests that begin with the same documents; what each says besides the model's name and the length."""

    requests: list[dict[str, Any]]
    answers: list[str | None]
    """The right ones; None where there is none."""


def demo_talk(seed: int, tokens: int, questions: int) -> Talk:
    """Return documents of about ``tokens``, and ``questions`` of the demo model's kinds, at most one of each."""
    dialogue = heldout_dialogue(seed, tokens, MEASURED_KINDS[:questions])
    requests = []
    for turn in dialogue.turns:
        one = Dialogue(dialogue.system, dialogue.documents, [turn], preamble=dialogue.preamble)
        body: dict[str, Any] = {"messages": one.messages(last_answer=False)}
        requests.append(body | ({"documents": one.documents} if one.documents else {}))
    return Talk(requests, [turn.answer for turn in dialogue.turns])


def word_talk(seed: str, tokens: int, questions: int, text: Words) -> Talk:
    """The same of common words."""
    rng = random.Random(seed)
    document = _message("system", text, rng, (int(SHORTEST_SHARE * tokens), tokens))
    asked = [_message("user", text, rng, QUESTION_TOKENS) for _ in range(questions)]
    return Talk([{"messages": [document, question]} for question in asked], [None] * questions)


def _message(role: str, text: Words, rng: random.Random, lengths: tuple[int, int]) -> Mapping[str, str]:
    return {"role": role, "content": text(rng, rng.randint(*lengths))}
