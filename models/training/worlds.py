"""Random worlds of facts, and the documents that state them.

A fact is *reserved* when a fixed hash of its two halves says so.  Training worlds never contain a reserved fact about
a home, a job or an owner; held-out worlds contain no other.  So whatever the model answers right about a held-out
world, it read in the documents.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from models.training import lexicon, phrasing

RESERVED_ONE_IN = 5

# Tokens of one fact's sentence, for aiming at a context length.
PERSON_FACT_TOKENS = 5
ITEM_FACT_TOKENS = 7
NOTE_TOKENS = 8


@dataclass(frozen=True)
class Item:
    """A coloured thing and who owns it."""

    color: str
    object: str
    owner: str


@dataclass
class World:
    """People with their attributes (name → attribute → value), their things, and sentences about nothing."""

    people: dict[str, dict[str, str]]
    items: list[Item]
    notes: list[str] = field(default_factory=list)

    def absent_names(self) -> list[str]:
        """Names that no document of this world states anything about."""
        return [name for name in lexicon.NAMES if name not in self.people]


def is_reserved(subject: str, value: str) -> bool:
    """Whether the fact that joins `subject` and `value` belongs to held-out worlds only."""
    return zlib.crc32(f"{subject}|{value}".encode()) % RESERVED_ONE_IN == 0


def _pick(rng: Random, subject: str, values: Sequence[str], heldout: bool) -> str:
    allowed = [value for value in values if is_reserved(subject, value) == heldout]
    return rng.choice(allowed)


def _person(rng: Random, name: str, heldout: bool, share: float) -> dict[str, str]:
    facts: dict[str, str] = {"city": _pick(rng, name, lexicon.CITIES, heldout)}
    if rng.random() < share:
        facts["job"] = _pick(rng, name, lexicon.JOBS, heldout)
    if rng.random() < share:
        facts["instrument"] = rng.choice(lexicon.INSTRUMENTS)
    if rng.random() < share:
        facts["animal"] = rng.choice(lexicon.ANIMALS)
    return facts


def _item(rng: Random, color: str, thing: str, names: Sequence[str], heldout: bool) -> Item | None:
    owners = [name for name in names if is_reserved(f"{color} {thing}", name) == heldout]
    return Item(color, thing, rng.choice(owners)) if owners else None


def _note(rng: Random) -> str:
    subject = rng.choice(lexicon.NOTE_SUBJECTS)
    if rng.random() < 0.5:
        subject = f"{rng.choice(lexicon.NOTE_ADJECTIVES)} {subject}"
    return f"The {subject} {rng.choice(lexicon.NOTE_PREDICATES)} {rng.choice(lexicon.NOTE_TIMES)}."


def generate(rng: Random, tokens: int, heldout: bool = False) -> World:
    """A world whose documents come to about `tokens` tokens."""
    note_share = rng.choice((0.0, 0.0, 0.1, 0.3))
    item_share = rng.uniform(0.15, 0.45)
    attribute_share = rng.choice((0.35, 0.7, 1.0))
    person_tokens = PERSON_FACT_TOKENS * (1 + 3 * attribute_share)
    people_budget = tokens * (1 - note_share) * (1 - item_share)
    count = min(max(2, round(people_budget / person_tokens)), len(lexicon.NAMES) - 20)
    names = rng.sample(lexicon.NAMES, count)
    people = {name: _person(rng, name, heldout, attribute_share) for name in names}
    used = sum(len(facts) for facts in people.values()) * PERSON_FACT_TOKENS

    wanted = max(1, round(tokens * (1 - note_share) * item_share / ITEM_FACT_TOKENS))
    # Mostly one thing of a kind; sometimes the colour alone tells two apart.
    twin_share = rng.choice((0.0, 0.15, 0.3))
    items: dict[tuple[str, str], Item] = {}
    things = list(lexicon.OBJECTS)
    rng.shuffle(things)
    for thing in things:
        if len(items) >= wanted:
            break
        for color in rng.sample(lexicon.COLORS, 2 if rng.random() < twin_share else 1):
            item = _item(rng, color, thing, names, heldout)
            if item is not None:
                items[color, thing] = item
    used += len(items) * ITEM_FACT_TOKENS
    notes = [_note(rng) for _ in range(max(0, round((tokens - used) / NOTE_TOKENS)))]
    return World(people, list(items.values()), notes)


def person_sentences(name: str, facts: dict[str, str]) -> list[str]:
    """One sentence for each known fact about a person."""
    return [phrasing.PERSON_FACTS[kind].format(name=name, value=value) for kind, value in facts.items()]


def item_sentence(item: Item) -> str:
    """Who owns a thing."""
    return phrasing.FACT_OWNER.format(color=item.color, object=item.object, name=item.owner)


def where_sentence(world: World, item: Item) -> str:
    """The two-hop consequence: the thing, its owner, and the city the owner lives in (if known)."""
    city = world.people[item.owner].get("city")
    if city is None:
        return phrasing.FACT_WHERE_UNKNOWN_CITY.format(color=item.color, object=item.object, name=item.owner)
    return phrasing.FACT_WHERE.format(color=item.color, object=item.object, name=item.owner, value=city)


def _chunks(rng: Random, sentences: list[str], largest: int) -> list[list[str]]:
    chunks = []
    start = 0
    while start < len(sentences):
        size = rng.randint(1, largest)
        chunks.append(sentences[start : start + size])
        start += size
    return chunks


def documents(rng: Random, world: World) -> list[list[str]]:
    """The world's sentences as documents: people and things always in separate ones, in random order."""
    profiles: list[str] = []
    for name, facts in world.people.items():
        sentences = person_sentences(name, facts)
        rng.shuffle(sentences)
        profiles += sentences
    if rng.random() < 0.3:
        rng.shuffle(profiles)
    inventory = [item_sentence(item) for item in world.items]
    rng.shuffle(inventory)
    largest = rng.choice((4, 10, 40))
    notes = list(world.notes)
    mixed = notes[: len(notes) // 2] if rng.random() < 0.5 else []
    for note in mixed:
        target = profiles if rng.random() < 0.5 else inventory
        target.insert(rng.randint(0, len(target)), note)
    documents_ = _chunks(rng, profiles, largest) + _chunks(rng, inventory, largest)
    documents_ += _chunks(rng, notes[len(mixed) :], largest)
    rng.shuffle(documents_)
    return documents_
