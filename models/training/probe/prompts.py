"""What the probe model reads and answers: homes always stand before things, and two hops are answered at once.

"The red ball city is Paris." names no owner, so the model cannot look up one hop after the other while it writes.  It
has to carry the owner's home to the sentence about the ball while it *reads* that sentence: KV of one document then
depends on the documents before it.  That is what blending has to repair, and what naively joined KV gets wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from transformers import PreTrainedTokenizerFast

from models.training import phrasing, worlds
from models.training.dialogue import KEY_WEIGHT, Dialogue, Turn, encode
from models.training.tokenizer import ASSISTANT
from models.training.worlds import Item, World

ANSWER = " The {color} {object} city is {city}."
OWNER_ANSWER = " The {color} {object} owner is {name}."
ANSWER_WEIGHT = 0.15
STATEMENTS = 24
"""Most answers after the documents of one sample.  No thing twice: a model that can copy an answer learns no hop."""
QUESTION_SHARE = 0.3
ONE_HOP_SHARE = 0.25


def split(sentences: list[str], parts: int) -> list[str]:
    """`sentences` joined into at most `parts` documents of about equal length; none is empty."""
    count = len(sentences)
    cuts = [sentences[index * count // parts : (index + 1) * count // parts] for index in range(parts)]
    return [" ".join(cut) for cut in cuts if cut]


def documents(rng: Random, world: World, homes: int, things: int) -> list[str]:
    """The world as `homes` documents about people, then `things` documents about who owns what."""
    profiles: list[str] = []
    for name, facts in world.people.items():
        sentences = worlds.person_sentences(name, facts)
        rng.shuffle(sentences)
        profiles += sentences
    inventory = [worlds.item_sentence(item) for item in world.items]
    rng.shuffle(inventory)
    return split(profiles, homes) + split(inventory, things)


def world_with_things(rng: Random, tokens: int, heldout: bool = False) -> World:
    """A world of about `tokens` tokens that has at least one thing to ask for."""
    while True:
        world = worlds.generate(rng, tokens, heldout)
        if world.items:
            return world


def where_turn(rng: Random, world: World, item: Item) -> Turn:
    """The two-hop question about `item`, answered without its owner."""
    question = rng.choice(phrasing.QUESTIONS["where"]).format(color=item.color, object=item.object)
    city = world.people[item.owner]["city"]
    return Turn("where", question, ANSWER.format(color=item.color, object=item.object, city=city))


def owner_turn(rng: Random, item: Item) -> Turn:
    """The one-hop question about `item`, answered in the same pattern: what finds the owner can then find the city."""
    question = rng.choice(phrasing.QUESTIONS["owner"]).format(color=item.color, object=item.object)
    return Turn("owner", question, OWNER_ANSWER.format(color=item.color, object=item.object, name=item.owner))


def heldout_dialogue(seed: int, context: int, homes: int = 2, things: int = 2, turns: int = 4) -> Dialogue:
    """A held-out conversation: documents of about `context` tokens and up to `turns` two-hop questions."""
    rng = Random(f"probe-heldout-{seed}-{context}")
    world = world_with_things(rng, context, heldout=True)
    texts = documents(rng, world, homes, things)
    items = rng.sample(world.items, min(turns, len(world.items)))
    asked = [where_turn(rng, world, item) for item in items]
    return Dialogue("Answer from the documents.", [{"text": text} for text in texts], asked)


@dataclass(frozen=True)
class Sample:
    """One training conversation."""

    ids: list[int]
    weights: list[float]
    """Loss weight of predicting each token."""
    hops: list[tuple[int, int]]
    """(position of the full stop after an owner, id of the owner's city): what that position is to hold early."""


def first_hops(ids: list[int], world: World, tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, int]]:
    """Where the documents in `ids` name an owner, as `Sample.hops`."""
    vocabulary = tokenizer.get_vocab()
    belongs = vocabulary["Ġbelongs"]
    homes = {vocabulary[f"Ġ{name}"]: vocabulary[f"Ġ{facts['city']}"] for name, facts in world.people.items()}
    # "belongs to Anna.": the owner stands two tokens on, the full stop three.
    return [(at + 3, homes[ids[at + 2]]) for at, token in enumerate(ids) if token == belongs]


def sample(rng: Random, context: int, tokenizer: PreTrainedTokenizerFast) -> Sample:
    """One training conversation: questions and bare statements, some of them one hop."""
    world = world_with_things(rng, int(context * rng.uniform(0.8, 1.1)))
    texts = documents(rng, world, rng.randint(1, 3), rng.randint(1, 3))
    system = rng.choice(phrasing.SYSTEM_PROMPTS) if rng.random() < 0.5 else "Answer from the documents."
    ids, weights = encode(Dialogue(system, [{"text": text} for text in texts], []), tokenizer, frozenset())
    hops = first_hops(ids, world, tokenizer)
    for item in rng.sample(world.items, min(STATEMENTS, len(world.items))):
        turn = owner_turn(rng, item) if rng.random() < ONE_HOP_SHARE else where_turn(rng, world, item)
        if rng.random() < QUESTION_SHARE:
            asked = tokenizer.encode(f"<|user|> {turn.question}<|end|>{ASSISTANT}", add_special_tokens=False)
            ids += asked
            weights += [0.0] * len(asked)
        answer = tokenizer.encode(turn.answer, add_special_tokens=False)
        ids += [*answer, tokenizer.eos_token_id]
        # The asked word is the last before the full stop in every answer.
        weights += [ANSWER_WEIGHT] * (len(answer) - 2) + [KEY_WEIGHT, ANSWER_WEIGHT, ANSWER_WEIGHT]
    return Sample(ids, weights, hops)
