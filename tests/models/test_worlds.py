"""Worlds are seeded, and held-out facts never occur in training worlds."""

from __future__ import annotations

import re
from random import Random

import pytest

from models.training import curriculum, worlds
from models.training.dialogue import question_about
from models.training.evaluate import MEASURED_KINDS, heldout_dialogue
from models.training.phrasing import NOT_SAID
from models.training.tokenizer import build_tokenizer


def reserved_halves(world: worlds.World) -> list[tuple[str, str]]:
    """The pairs that the split is made by: (name, city), (name, job), (thing, owner)."""
    people = world.people.items()
    pairs = [(name, facts[kind]) for name, facts in people for kind in ("city", "job") if kind in facts]
    return pairs + [(f"{item.color} {item.object}", item.owner) for item in world.items]


@pytest.mark.parametrize("heldout", [False, True])
@pytest.mark.parametrize("tokens", [64, 512, 3_000])
def test_facts_of_training_and_heldout_worlds_are_disjoint(heldout: bool, tokens: int) -> None:
    for seed in range(10):
        world = worlds.generate(Random(seed), tokens, heldout)
        assert all(worlds.is_reserved(*pair) == heldout for pair in reserved_halves(world))


def test_one_seed_gives_one_world() -> None:
    assert worlds.generate(Random(3), 256) == worlds.generate(Random(3), 256)
    assert worlds.generate(Random(3), 256) != worlds.generate(Random(4), 256)


@pytest.mark.parametrize("tokens", [64, 256, 1_024, 3_000])
def test_documents_come_to_about_the_tokens_asked_for(tokens: int) -> None:
    tokenizer = build_tokenizer()
    for seed in range(8):
        rng = Random(seed)
        texts = [" ".join(text) for text in worlds.documents(rng, worlds.generate(rng, tokens))]
        counted = sum(len(tokenizer.encode(f" {text}")) for text in texts)
        assert 0.6 * tokens <= counted <= 1.5 * tokens


def test_people_and_things_are_never_in_one_document() -> None:
    for seed in range(20):
        rng = Random(seed)
        for document in worlds.documents(rng, worlds.generate(rng, 300)):
            assert not (any("lives in" in s for s in document) and any("belongs to" in s for s in document))


@pytest.mark.parametrize("kind", ["unknown person", "unknown thing", "other color", "missing", "unanswerable"])
def test_what_the_documents_do_not_say_is_not_in_them(kind: str) -> None:
    for seed in range(50):
        rng = Random(seed)
        world = worlds.generate(rng, 128)
        turn = question_about(rng, world, kind)
        assert turn.answer.lower().endswith(NOT_SAID.lower())
        if kind == "unknown person":
            assert not set(re.findall(r"\w+", turn.question)) & set(world.people)
        if kind == "unknown thing":
            assert not set(re.findall(r"\w+", turn.question)) & {item.object for item in world.items}
        if kind == "other color":
            assert not any(f" {item.color} {item.object}" in turn.question for item in world.items)


def test_a_step_draws_the_same_samples_after_a_restart() -> None:
    tokenizer = build_tokenizer()
    keys = curriculum.key_ids(tokenizer)
    assert curriculum.batch(1, 7, 10_000, tokenizer, keys) == curriculum.batch(1, 7, 10_000, tokenizer, keys)
    assert curriculum.batch(1, 7, 10_000, tokenizer, keys) != curriculum.batch(1, 8, 10_000, tokenizer, keys)


def test_the_heldout_conversations_are_fixed() -> None:
    assert heldout_dialogue(1, 256, MEASURED_KINDS).messages() == heldout_dialogue(1, 256, MEASURED_KINDS).messages()
