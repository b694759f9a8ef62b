"""Prompts whose states are stored, and what is planned of them."""

from made_choices import Chosen

from kvmanager.extensions.states.landings import STATES, LandingQuery
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.keys import state_name


def save_states(brain, text, tenant=""):
    """Store the states behind a prompt; return whether the manager wanted them."""
    names = [*brain.hashes(text), state_name(brain.hashes(text)[-1])]
    spans = brain.manager.cut(brain.cpu, names, len(text), len(names), len(names), tenant)
    offer = brain.manager.offer(brain.now, "replica", brain.cpu, spans, [1] * len(spans))
    brain.commit(offer.keys)
    return len(offer.keys) == 1


def store(brain, text, *boundaries, tenant=""):
    """Store a prompt, and the states behind its first so many tokens."""
    brain.serve(text, tenant=tenant)
    for boundary in boundaries:
        assert save_states(brain, text[:boundary], tenant)


def store_answer(brain, text, prompt_blocks):
    """Store what was sampled behind a prompt of so many blocks."""
    spans = brain.manager.cut(brain.cpu, brain.hashes(text), prompt_blocks, len(text), prompt_blocks, "")
    brain.commit(brain.manager.offer(brain.now, "replica", brain.cpu, spans, [1] * len(spans)).keys)


def plan(brain, text, choose=None, asked=LandingQuery()):  # noqa: B008
    query = PlanQuery(brain.hashes(text), prompt_tokens=len(text), extras={STATES: asked})
    return brain.manager.plan(brain.now, "replica", "node", query, Chosen(choose) if choose else None)


def landing(made):
    """How far the segments reach, where the states are, and where others are to be kept."""
    found = made.extras.get(STATES)
    state = found.state.start_block if found and found.state else 0
    return made.segments[-1].end_block if made.segments else 0, state, found.kept_block if found else 0
