"""Held-out measurement: is the *whole* answer what greedy decoding would write?

A greedy answer equals the expected one exactly when, reading the expected answer, the model's first choice is right at
every one of its tokens and at the end-of-turn.  So one forward pass per conversation measures exact match, and a
conversation of several questions measures them all (each asked after the right answers to those before).
"""

from __future__ import annotations

from collections import defaultdict
from random import Random

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.training import worlds
from models.training.dialogue import Dialogue, Turn, compose, encode, question_about
from models.training.phrasing import PERSON_FACTS
from models.training.tokenizer import ASSISTANT

EVALUATION_SEED = 9_000
# What a run shows while it trains, and what people steer by, is measured on other conversations than the card.
MONITOR_SEED = 900_000
MEASURED_KINDS: tuple[str, ...] = (
    "city",
    "job",
    "instrument",
    "animal",
    "owner",
    "where",
    "unknown person",
    "unknown thing",
    "other color",
    "missing",
    "unanswerable",
)
ONE_HOP: tuple[str, ...] = (*PERSON_FACTS, "owner")

Tally = dict[str, tuple[int, int]]


def heldout_dialogue(seed: int, context: int, kinds: tuple[str, ...]) -> Dialogue:
    """A conversation over a held-out world of about `context` tokens: one question of each kind, in random order."""
    rng = Random(f"heldout-{seed}-{context}")
    world = worlds.generate(rng, context, heldout=True)
    turns: list[Turn] = [question_about(rng, world, kind) for kind in kinds]
    rng.shuffle(turns)
    return compose(rng, world, turns)


@torch.no_grad()
def right_turns(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue
) -> list[tuple[str, bool]]:
    """For each turn its kind and whether greedy decoding writes exactly its answer and ends there."""
    ids, _ = encode(dialogue, tokenizer, frozenset())
    predicted = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    found = []
    mark = tokenizer.get_vocab()[ASSISTANT]
    position = 0
    for turn in dialogue.turns:
        # The i-th answer begins after the i-th assistant mark.
        position = ids.index(mark, position) + 1
        length = len(tokenizer.encode(turn.answer, add_special_tokens=False)) + 1
        right = predicted[position - 1 : position - 1 + length] == ids[position : position + length]
        found.append((turn.kind, right))
        position += length
    return found


def exact_match(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    context: int,
    prompts: int,
    seed: int = EVALUATION_SEED,
    kinds: tuple[str, ...] = MEASURED_KINDS,
) -> Tally:
    """Kind → (right, asked) over `prompts` held-out conversations with documents of about `context` tokens."""
    tally: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for number in range(prompts):
        dialogue = heldout_dialogue(seed + number, context, kinds)
        for kind, right in right_turns(model, tokenizer, dialogue):
            tally[kind][0] += right
            tally[kind][1] += 1
    return {kind: (right, asked) for kind, (right, asked) in sorted(tally.items())}
