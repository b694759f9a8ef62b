"""Pins of a model with states keep the states that a prompt is loaded with, and no others; refusals have sentences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.manager.control import _SENTENCES, Control
from kvmanager.config import ManagerConfig
from kvmanager.extensions import plan_extensions
from kvmanager.extensions.states.landings import STATES, LandingQuery
from kvmanager.index.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.directives import Outcome
from kvmanager.moves.plan import Plan, PlanQuery
from kvmanager.segments.keys import BlockHash, block_hashes, state_name

CPU = Location(Tier.CPU, "node")
BUDGET_BYTES = 8
"""Of the tier, in which a segment has one byte."""
FIRST = "abcdef"


class Room:
    """A manager's brain with one small tier, and the orders of people to it."""

    def __init__(self) -> None:
        config = ManagerConfig(blocks_per_segment=2, block_tokens=1, pin_budget_bytes=1 << 20)
        self.brain = KVManager(config, epoch=1, extensions=plan_extensions([STATES]))
        self.brain.set_budget(CPU, BUDGET_BYTES)
        no_directives: Any = SimpleNamespace(evict=None, offload=None, onboard=None)
        nothing: Any = None
        self.control = Control(self.brain, {}, no_directives, nothing, nothing)

    def save(self, names: list[BlockHash]) -> None:
        spans = self.brain.cut(CPU, names, 0, len(names), len(names), "")
        offer = self.brain.offer(0.0, "replica", CPU, spans, [1] * len(spans))
        self.brain.commit(0.0, CPU, list(offer.keys), [1] * len(offer.keys))

    def serve(self, text: str, *boundaries: int) -> None:
        """Compute a prompt, save it and its states at some boundaries."""
        self.brain.release(self.plan(text).lease_id)
        self.save(names_of(text))
        for end in boundaries:
            names = names_of(text[:end])
            self.save([*names, state_name(names[-1])])

    def plan(self, text: str) -> Plan:
        return self.brain.plan(
            0.0, "replica", "node", PlanQuery(names_of(text), prompt_tokens=len(text), extras={STATES: LandingQuery()})
        )

    def crowd(self) -> None:
        """Serve prompts that are hotter than what was used once before."""
        for number in range(40):
            self.serve(chr(1000 + number % 3) * 4)

    def landing(self, text: str) -> int:
        """How far a prompt is loaded."""
        made = self.plan(text)
        self.brain.release(made.lease_id)
        return made.segments[-1].end_block if made.segments else 0


def names_of(text: str) -> list[BlockHash]:
    return block_hashes([ord(letter) for letter in text], 1, "tests")


@pytest.fixture
def room() -> Room:
    return Room()


def test_a_pinned_prompt_is_loaded_to_its_last_landing_whatever_comes(room: Room) -> None:
    room.serve(FIRST, 2, 6)
    assert room.landing(FIRST + "xy") == 6
    report = room.control.pin(names_of(FIRST + "xy"), 60.0)
    assert report["segments"] == 4, "three of tokens, and the last states"
    room.crowd()
    assert room.landing(FIRST + "xy") == 6
    assert room.landing("abxy") == 0, "states that this prompt is not loaded with went"


def test_of_states_behind_a_prompts_last_token_those_before_them_are_kept_too(room: Room) -> None:
    room.serve(FIRST, 5, 6)
    assert room.control.pin(names_of(FIRST), 60.0)["segments"] == 5
    room.crowd()
    assert (room.landing(FIRST), room.landing(FIRST + "x")) == (5, 6)


def test_an_ended_pin_lets_the_states_go_that_came_meanwhile_too(room: Room) -> None:
    room.serve(FIRST, 4)
    room.control.pin(names_of(FIRST), 60.0)
    room.serve(FIRST, 6)
    room.control.pin(names_of(FIRST), 60.0)
    assert room.control.unpin(names_of(FIRST)) == {"unpinned": 3}
    room.crowd()
    assert room.landing(FIRST + "x") == 0


def test_a_pin_of_a_model_without_states_is_of_its_tokens(room: Room) -> None:
    room.serve(FIRST)
    assert room.control.pin(names_of(FIRST), 60.0)["segments"] == 3
    assert room.control.unpin(names_of(FIRST)) == {"unpinned": 1}


def test_each_way_in_which_a_directive_fails_has_a_sentence() -> None:
    assert set(_SENTENCES) == set(Outcome) - {Outcome.DONE}
