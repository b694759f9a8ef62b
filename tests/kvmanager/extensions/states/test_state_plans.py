"""A plan for an engine with states ends where states are stored, and says where more of the prompt is."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from stored_states import landing, plan, save_states, store, store_answer

from kvmanager.extensions.states.landings import NO_STATE, STATES, LandingQuery
from kvmanager.moves.plan import PlanReason
from kvmanager.segments.keys import state_name


def test_a_load_ends_where_states_are_and_the_last_token_is_computed(brain):
    store(brain, "abcdef", 6)
    assert landing(plan(brain, "abcdefgh")) == (6, 6, 0)
    assert landing(plan(brain, "abcdef")) == (0, 0, 5), "the states behind it are one token too far"
    assert landing(plan(brain, "xyz")) == (0, 0, 0)


def test_nothing_is_loaded_of_a_beginning_without_states_and_the_plan_says_why(brain):
    store(brain, "abcdef", 6)
    made = plan(brain, "abcdxy")
    assert (landing(made), made.reason, made.lease_id) == ((0, 0, 4), NO_STATE, 0)
    assert (plan(brain, "xyz").reason, plan(brain, "xyz").extras) == (PlanReason.COLD, {})


def test_a_junction_inside_a_stored_segment_has_states_of_its_own(brain):
    store(brain, "abcdef", 6)
    assert landing(plan(brain, "abcxy")) == (0, 0, 3)
    brain.serve("abcxy")
    assert save_states(brain, "abc")
    made = plan(brain, "abcpq")
    assert landing(made) == (3, 3, 0)
    assert made.segments[-1].used_blocks == 1
    assert made.segments[-1].last_hash == brain.hashes("abc")[-1]
    assert landing(plan(brain, "abcdefgh")) == (6, 6, 0), "the longer one is still there"


def test_the_longest_landing_within_a_prompt_is_taken(brain):
    store(brain, "abcdef", 2, 4, 6)
    made = plan(brain, "abcdex")
    assert landing(made) == (4, 4, 5)
    assert made.extras[STATES].state.key == state_name(brain.hashes("abcd")[-1])


def test_a_choice_of_less_ends_at_an_earlier_landing_or_loads_nothing(brain):
    store(brain, "abcdef", 2, 6)
    first = plan(brain, "abcdefgh", choose=lambda segments: (2, PlanReason.PARTIAL))
    assert landing(first) == (2, 2, 0)
    nothing = plan(brain, "abcdefgh", choose=lambda segments: (0, PlanReason.RECOMPUTE_FASTER))
    assert (landing(nothing), nothing.reason) == ((0, 0, 0), PlanReason.RECOMPUTE_FASTER)


def test_states_are_a_leaf_that_goes_before_what_it_follows_on_unless_a_load_reads_it(brain_with):
    brain = brain_with(budget=3)
    store(brain, "abcd", 4)
    made = plan(brain, "abcdef")
    assert landing(made) == (4, 4, 0)
    for _ in range(9):
        assert brain.serve("xy") == 0, "there is no room"
    brain.manager.release(made.lease_id)
    brain.serve("xy")
    assert (brain.stored("abcd"), brain.stored("xy")) == (4, 2)
    assert landing(plan(brain, "abcdef")) == (0, 0, 4)


def kept(brain, text, message, least=2):
    """The boundary that a plan names for a prompt whose last message begins behind so many blocks."""
    found = plan(brain, text, asked=LandingQuery(message, least)).extras.get(STATES)
    return found.kept_block if found else 0


@pytest.mark.parametrize(
    ("message", "named"),
    [(4, 4), (2, 2), (1, 0), (0, 0), (5, 0), (6, 0), (1 << 40, 0), (-3, 0)],
    ids=lambda value: str(value),
)
def test_of_a_new_prompt_states_are_kept_before_its_last_message_if_they_serve_enough(brain, message, named):
    """The states at its end, here behind five blocks, are kept anyway."""
    assert kept(brain, "abcdef", message) == named
    assert kept(brain, "abcdef", message, least=-7) == (named or (1 if message == 1 else 0))


def test_before_a_last_message_states_are_kept_only_where_they_serve_enough_behind_stored_ones(brain):
    store(brain, "abcd", 2, 3)
    assert [kept(brain, "abcxyzpq", message) for message in (3, 4, 5, 6, 7)] == [0, 0, 5, 6, 0]
    assert landing(plan(brain, "abcxyzpq", asked=LandingQuery(6, 2))) == (3, 3, 6), "and what is stored is loaded"


def test_where_a_prompt_has_parted_from_a_stored_one_goes_before_its_last_message(brain):
    store(brain, "abcdef", 6)
    assert kept(brain, "abxyzpq", 5) == 2


def test_a_conversation_that_goes_on_has_states_at_its_end_and_none_before_its_next_message(brain):
    store(brain, "abcd")
    store_answer(brain, "abcdef", prompt_blocks=4)
    assert save_states(brain, "abcdef")
    assert landing(plan(brain, "abcdefxyzpq", asked=LandingQuery(9))) == (6, 6, 0)


def test_other_engines_do_not_see_states(brain):
    store(brain, "abcdef", 2, 6)
    made = brain.plan("abcdxy")
    assert (made.segments[-1].end_block, made.extras) == (4, {})


@settings(max_examples=60, deadline=None)
@given(
    saved=st.lists(st.tuples(st.text("ab", min_size=1, max_size=9), st.integers(1, 9)), max_size=12),
    asked=st.text("ab"),
)
def test_a_landing_is_the_last_boundary_of_which_tokens_and_states_are_stored(brain_with, saved, asked):
    brain = brain_with(budget=1000)
    landings = set()
    for text, boundary in saved:
        brain.serve(text)
        if boundary <= len(text):
            save_states(brain, text[:boundary])
            landings.add(text[:boundary])
    possible = [n for n in range(1, len(asked)) if asked[:n] in landings]
    reach = max((n for n in range(len(asked)) for text, _ in saved if text.startswith(asked[:n])), default=0)
    best = max(possible, default=0)
    assert landing(plan(brain, asked)) == (best, best, reach if reach > best else 0)


def test_names_of_states_are_names_of_nothing_else(brain):
    hashes = brain.hashes("abab")
    names = {state_name(each) for each in hashes}
    assert len(names) == 4
    assert not names & set(hashes)
    assert all(len(name) == len(hashes[0]) for name in names)


@pytest.fixture(autouse=True)
def _room(brain):
    brain.manager.set_budget(brain.cpu, 100)
