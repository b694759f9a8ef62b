"""What is asked: prompts of documents, and stretches of text after them that a model gets right or not.

Every stretch is read, not generated: a greedy answer equals the expected one exactly when the model's first choice is
right at each of its tokens (`models.training.evaluate`). Four kinds are about worlds that no training document states:

- one hop: a home, a job, an instrument, an animal, an owner (demo model);
- two hops: where a thing is. The demo model answers it one hop after the other, the probe model at once: only there do
  the documents have to have seen each other;
- distractors: a thing that stands there in another colour only, or not at all, or a name that does not (demo model);
- copied: sentences that no question is about, given their first four tokens; counted by token (demo model).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from configs.settings import PROJECT_ROOT
from load_tests.blending.prompts import Prompt
from models.training.dialogue import Dialogue, Turn, encode, question_about
from models.training.evaluate import ONE_HOP
from models.training.probe import prompts as probe_prompts
from models.training.tokenizer import ASSISTANT, DOC, END, USER

DEMO, PROBE = PROJECT_ROOT / "models" / "demo", PROJECT_ROOT / "models" / "probe"
SYSTEM = "Answer from the documents."
NO_SUCH = ("unknown person", "unknown thing", "other color")
COPIED_SENTENCES, GIVEN_TOKENS = 3, 4
CONTEXTS = (256, 512, 1024)
KINDS = ("one hop", "two hops", "distractors", "copied", "joined hops", "own answers")
"""Columns, in order. `joined hops`: the probe model's. `own answers`: of a user's prompts, as after a whole prefill."""


@dataclass(frozen=True)
class Stretch:
    """Tokens [first, stop) of a case's ids that the model is to get right."""

    kind: str
    first: int
    stop: int
    by_token: bool = False
    """Each token counts, not the whole."""


@dataclass(frozen=True)
class Case:
    """One prompt with what follows it."""

    ids: list[int]
    chunks: list[tuple[int, int]]
    """[start, stop) of the documents."""
    prefix: int
    """Tokens before the first question: what is stored lies in them."""
    stretches: list[Stretch]


def demo_cases(tokenizer: Any, conversations: int, seed: int) -> Iterator[Case]:
    """Of the demo model: one question of each kind and some sentences to copy, contexts in turn."""
    for number in range(conversations):
        rng = Random(f"quality-{seed}-{number}")
        context = CONTEXTS[number % len(CONTEXTS)]
        world = probe_prompts.world_with_things(rng, context, heldout=True)
        turns = [question_about(rng, world, kind) for kind in (*ONE_HOP, "where", *NO_SUCH)]
        rng.shuffle(turns)
        texts = probe_prompts.documents(rng, world, 2, 2) + probe_prompts.split(world.notes, 1)
        rng.shuffle(texts)
        documents = [{"text": text} for text in texts]
        copied = rng.sample(world.notes, min(COPIED_SENTENCES, len(world.notes)))
        yield _case(tokenizer, Dialogue(SYSTEM, documents, turns), _demo_kind, copied)


def probe_cases(tokenizer: Any, conversations: int, seed: int) -> Iterator[Case]:
    """Of the probe model: up to four two-hop questions over homes, then things, at 512 tokens."""
    for number in range(conversations):
        yield _case(tokenizer, probe_prompts.heldout_dialogue(seed + number, 512), lambda _: "joined hops", [])


def own_case(prompt: Prompt, answer: Sequence[int]) -> Case:
    """Of a user's prompt: the answer that the model gives after a whole prefill."""
    end = len(prompt.ids)
    return Case([*prompt.ids, *answer], prompt.chunks, end - 1, [Stretch("own answers", end, end + len(answer))])


def is_built_in(model: Path | str) -> bool:
    """Whether there are questions for this model."""
    return model in (DEMO, PROBE)


def _demo_kind(turn: Turn) -> str:
    if turn.kind in ONE_HOP:
        return "one hop"
    return "two hops" if turn.kind == "where" else "distractors"


def _case(tokenizer: Any, dialogue: Dialogue, kind_of: Any, copied: Sequence[str]) -> Case:
    vocabulary = tokenizer.get_vocab()
    ids, _ = encode(dialogue, tokenizer, frozenset())
    starts = [place for place, token in enumerate(ids) if token == vocabulary[DOC]]
    stop = ids.index(vocabulary[END], starts[-1])
    position, stretches = stop, []
    for turn in dialogue.turns:
        position = ids.index(vocabulary[ASSISTANT], position) + 1
        end = position + len(tokenizer.encode(turn.answer, add_special_tokens=False)) + 1
        stretches.append(Stretch(kind_of(turn), position, end))
        position = end
    for sentence in copied:
        ids += tokenizer.encode(f"{USER} Recite the facts.{END}{ASSISTANT}", add_special_tokens=False)
        text = tokenizer.encode(f" {sentence}", add_special_tokens=False)
        first = len(ids) + GIVEN_TOKENS
        ids += [*text, tokenizer.eos_token_id]
        stretches.append(Stretch("copied", first, len(ids) - 1, by_token=True))
    return Case(ids, list(zip(starts, [*starts[1:], stop], strict=True)), stop, stretches)
