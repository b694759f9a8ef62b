"""Held-out questions to the demo model over stored KV: are the answers still right, and how far do the logits move?

A conversation's documents are a prefix whose KV is stored; the questions after it are computed from what a codec gives
back. A greedy answer equals the expected one exactly when the model's first choice is right at each of its tokens
(`models.training.evaluate`), so one forward pass after the prefix judges all questions of a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer

from configs.settings import PROJECT_ROOT
from load_tests.codec.model import continued, divergence, prefix_kv
from models.training import worlds
from models.training.dialogue import Dialogue, compose, encode, question_about
from models.training.evaluate import MEASURED_KINDS, heldout_dialogue
from models.training.tokenizer import ASSISTANT

DEMO = PROJECT_ROOT / "models" / "demo"
DEMO_PROFILE = DEMO / "kv_profile.dat"
"""Committed. Not `.bin`: what ends so counts as weights."""
BLOCK_TOKENS = 32
CONTEXTS = (256, 512, 1024)


@dataclass(frozen=True)
class Conversation:
    """Token ids cut where the stored prefix ends, and where the answers lie after it."""

    prefix: list[int]
    rest: list[int]
    answers: list[tuple[int, int]]
    """[first, last + 1) of each answer and its end mark, counted in `rest`."""
    kinds: tuple[str, ...] = ()
    """Of each question (`models.training.evaluate.MEASURED_KINDS`)."""


@dataclass(frozen=True)
class Asked:
    """A conversation, the KV of its prefix, and what the model says from that KV as it is."""

    conversation: Conversation
    kv: torch.Tensor
    logits: torch.Tensor
    """(answer tokens, vocabulary), at the answers alone."""
    right: list[bool]
    """Of each question."""


@dataclass(frozen=True)
class Judged:
    """Answers from a changed KV."""

    lost: int
    """Questions that the unchanged KV answers right, and this one does not."""
    gained: int
    """The other way round."""
    divergences: torch.Tensor
    """KL in nats at every token of an answer."""
    same_tokens: int
    """Of those tokens, how many are the choice that the unchanged KV leads to."""


def conversations(questions: int, seed: int, heldout: bool = True) -> Iterator[Conversation]:
    """Yield conversations, contexts in turn, up to ``questions`` in all; not ``heldout``: about training facts."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
    mark = tokenizer.get_vocab()[ASSISTANT]
    asked = 0
    while asked < questions:
        context = CONTEXTS[asked // len(MEASURED_KINDS) % len(CONTEXTS)]
        dialogue = _dialogue(seed + asked, context, heldout)
        ids, _ = encode(dialogue, tokenizer, frozenset())
        # Full blocks before the first answer, its mark left to compute: what a second client would find stored.
        stored = (ids.index(mark) // BLOCK_TOKENS) * BLOCK_TOKENS
        answers = []
        position = stored
        for turn in dialogue.turns:
            position = ids.index(mark, position) + 1
            end = position + len(tokenizer.encode(turn.answer, add_special_tokens=False)) + 1
            answers.append((position - stored, end - stored))
            position = end
        asked += len(answers)
        yield Conversation(ids[:stored], ids[stored:], answers, tuple(turn.kind for turn in dialogue.turns))


def _dialogue(seed: int, context: int, heldout: bool) -> Dialogue:
    if heldout:
        return heldout_dialogue(seed, context, MEASURED_KINDS)
    rng = Random(seed)
    world = worlds.generate(rng, context)
    turns = [question_about(rng, world, kind) for kind in MEASURED_KINDS]
    rng.shuffle(turns)
    return compose(rng, world, turns)


def ask(model: Any, conversation: Conversation) -> Asked:
    """Compute the prefix and the answers from it."""
    kv = prefix_kv(model, conversation.prefix)
    logits = continued(model, kv, conversation.rest)
    spans = torch.cat([torch.arange(first - 1, end - 1) for first, end in conversation.answers])
    right = _right(conversation, logits)
    return Asked(conversation, kv, logits[spans], right)


def judge(model: Any, asked: Asked, kv: torch.Tensor) -> Judged:
    """The same questions from another KV of that prefix."""
    conversation = asked.conversation
    logits = continued(model, kv, conversation.rest)
    spans = torch.cat([torch.arange(first - 1, end - 1) for first, end in conversation.answers])
    same = int((logits[spans].argmax(-1) == asked.logits.argmax(-1)).sum())
    pairs = list(zip(asked.right, _right(conversation, logits), strict=True))
    return Judged(pairs.count((True, False)), pairs.count((False, True)), divergence(asked.logits, logits[spans]), same)


def summed(judged: Sequence[Judged]) -> dict[str, Any]:
    """Numbers of all of them, for a table and a report."""
    divergences = torch.cat([one.divergences for one in judged])
    return {
        "lost": sum(one.lost for one in judged),
        "gained": sum(one.gained for one in judged),
        "tokens_changed": len(divergences) - sum(one.same_tokens for one in judged),
        "tokens": len(divergences),
        "kl": float(divergences.mean()),
    }


def _right(conversation: Conversation, logits: torch.Tensor) -> list[bool]:
    chosen = logits.argmax(-1).tolist()
    return [chosen[first - 1 : end - 1] == conversation.rest[first:end] for first, end in conversation.answers]
