"""The words of the demo's documents."""

from __future__ import annotations

from app.cli.demo import documents
from models.training import phrasing, worlds


def test_homes_jobs_and_owners_are_none_that_the_model_was_trained_on():
    for name, (city, job, _, _) in documents.FACTS.items():
        assert worlds.is_reserved(name, city.removeprefix(f"{name} lives in ").rstrip("."))
        assert worlds.is_reserved(name, job.removeprefix(f"{name} is a ").rstrip("."))
    for sentence in documents.OWNED:
        thing, owner = sentence.removeprefix("The ").rstrip(".").split(" belongs to ")
        assert worlds.is_reserved(thing, owner)


def test_greetings_are_worded_as_the_model_learned_them():
    assert [f" {reply}" for reply in documents.GREETING_REPLIES] == list(phrasing.GREETING_REPLIES)
