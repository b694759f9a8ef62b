"""What is trained when: contexts grow, recitals give way to questions, "the documents do not say" comes late.

Everything is a function of (seed, step), so a restarted run sees exactly the samples that an uninterrupted one would.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from transformers import PreTrainedTokenizerFast

from models.training import lexicon, worlds
from models.training.dialogue import Turn, compose, encode, question_about

Sample = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Stage:
    """Steps up to `until_tokens` (counted over the whole run) draw their samples from this mix."""

    until_tokens: int
    contexts: tuple[int, ...]
    recite_share: float
    unknown_share: float
    tokens_per_step: int


STAGES: tuple[Stage, ...] = (
    Stage(500_000, (64,), 0.75, 0.0, 3_000),
    Stage(900_000, (64, 128), 0.65, 0.0, 4_000),
    Stage(1_600_000, (64, 128, 256), 0.45, 0.04, 5_000),
    Stage(2_600_000, (64, 128, 256, 512), 0.35, 0.2, 6_000),
    Stage(4_500_000, (64, 128, 256, 256, 512), 0.1, 0.3, 3_500),
    Stage(5_300_000, (64, 256, 512, 1024, 1024, 3000), 0.1, 0.25, 5_000),
    Stage(7_100_000, (64, 128, 128, 256, 256, 512), 0.05, 0.3, 3_500),
    Stage(7_700_000, (128, 256, 512, 1024, 1024, 3000), 0.05, 0.3, 5_000),
)

KINDS: tuple[tuple[str, float], ...] = (
    ("city", 18),
    ("job", 11),
    ("instrument", 6),
    ("animal", 6),
    ("owner", 18),
    ("where", 26),
    ("tell", 7),
    ("talk", 4),
)
UNKNOWN_KINDS: tuple[tuple[str, float], ...] = (
    ("unknown person", 3),
    ("unknown thing", 6),
    ("other color", 1),
    ("missing", 1),
    ("unanswerable", 1),
)


def stage_at(tokens: int) -> Stage | None:
    """The stage after `tokens` trained tokens; None when the curriculum is over."""
    return next((stage for stage in STAGES if tokens < stage.until_tokens), None)


def total_tokens() -> int:
    """Tokens after which training ends."""
    return STAGES[-1].until_tokens


def _draw(rng: Random, kinds: tuple[tuple[str, float], ...]) -> str:
    return rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]


def sample(rng: Random, stage: Stage, context: int, tokenizer: PreTrainedTokenizerFast, keys: frozenset[int]) -> Sample:
    """One conversation over documents of about `context` tokens."""
    if context <= 64 and stage.unknown_share > 0 and rng.random() < 0.25:
        return _without_documents(rng, tokenizer, keys)
    world = worlds.generate(rng, int(context * rng.uniform(0.7, 1.05)))
    turns: list[Turn] = []
    if rng.random() < stage.recite_share:
        turns.append(question_about(rng, world, "recite"))
        if rng.random() < 0.3:
            turns.insert(0, question_about(rng, world, _draw(rng, KINDS)))
    else:
        most = 8 if context <= 64 else 16
        for _ in range(rng.randint(2, most)):
            unknown = rng.random() < stage.unknown_share
            turns.append(question_about(rng, world, _draw(rng, UNKNOWN_KINDS if unknown else KINDS)))
    return encode(compose(rng, world, turns), tokenizer, keys)


def _without_documents(rng: Random, tokenizer: PreTrainedTokenizerFast, keys: frozenset[int]) -> Sample:
    world = worlds.World({}, [])
    turns = [
        question_about(rng, world, "talk" if rng.random() < 0.6 else rng.choice(("unknown person", "unknown thing")))
        for _ in range(rng.randint(1, 3))
    ]
    dialogue = compose(rng, world, turns)
    return encode(dialogue, tokenizer, keys)


def batch(seed: int, step: int, tokens: int, tokenizer: PreTrainedTokenizerFast, keys: frozenset[int]) -> list[Sample]:
    """The samples of one step: one context length, as many conversations as fit the stage's token count."""
    stage = stage_at(tokens) or STAGES[-1]
    rng = Random(f"{seed}-{step}")
    context = rng.choice(stage.contexts)
    samples: list[Sample] = []
    total = 0
    while total < stage.tokens_per_step:
        samples.append(sample(rng, stage, context, tokenizer, keys))
        total += len(samples[-1][0])
    return samples


def key_ids(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Ids of the words that questions ask for."""
    vocabulary = tokenizer.get_vocab()
    return frozenset(vocabulary[f"Ġ{word}"] for word in lexicon.value_words())
