"""People see where a prompt of a model with states can be resumed: in a lookup, the trie, and the tiers' books."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from stored_states import landing, plan, save_states, store

from kvmanager.index.locations import Tier
from kvmanager.segments.head import read_header, write_header
from kvmanager.segments.header import SegmentHeader
from kvmanager.segments.keys import state_name
from kvmanager.segments.sizes import head_bytes
from kvmanager.segments.spans import NodeKind, split_segments
from kvmanager.views import tree as tree_module

WORDS_OF_A_LOOKUP = {"blocks", "device", "cpu", "redis", "redis_in_any_form", "segments"}
WORDS_OF_A_SEGMENT = {"key", "start", "num_blocks", "end", "tiers", "has_other_form", "kind", "pinned", "uses"}


def looked_up(brain, text):
    """How far a plan may load, the dense reach, and the landings of each segment."""
    found = brain.manager.lookup(brain.hashes(text), len(text) - 1)
    marks = [[(one["end"], *one["tiers"]) for one in segment["landings"]] for segment in found["segments"]]
    return found["landing"], max(found["cpu"], found["redis"]), marks


def nodes_of(brain, *asked):
    """The trie as it is shown, by where each node begins and ends: its landings, and its children."""
    views = brain.manager.views
    found = views.describe(views.tree(*asked).shown, {}, with_tenants=False)
    size = brain.manager.views._block_tokens
    place = lambda node: (node["start_token"] // size, (node["start_token"] + node["tokens"]) // size)  # noqa: E731
    marks = lambda node: [  # noqa: E731
        (one["end_token"] // size, *(tier for tier, nbytes in one["tiers"].items() if nbytes))
        for one in node.get("landings", ())
    ]
    return {place(node): (marks(node), node["children"], node["hidden"]) for node in found}


def test_a_lookup_marks_the_segments_that_can_be_resumed_in_and_says_how_far_a_plan_loads(brain):
    store(brain, "abcdef", 3, 6)
    assert looked_up(brain, "abcdefgh") == (6, 6, [[], [(3, "cpu")], [(6, "cpu")]])
    assert looked_up(brain, "abcdef") == (3, 6, [[], [(3, "cpu")], [(6, "cpu")]]), "one token is computed"
    assert looked_up(brain, "abcdxy") == (3, 4, [[], [(3, "cpu")]])
    assert looked_up(brain, "abxyz") == (0, 2, [[]])
    assert looked_up(brain, "xyz") == (0, 0, [])


def test_a_lookup_of_a_model_without_states_says_what_it_always_did(brain):
    store(brain, "abcdef", 6)
    found = brain.manager.lookup(brain.hashes("abcdef"))
    assert set(found) == WORDS_OF_A_LOOKUP
    assert {word for segment in found["segments"] for word in segment} == WORDS_OF_A_SEGMENT


def test_a_landing_is_in_the_tiers_that_have_its_states_and_is_no_more_when_these_are_gone(tiered):
    store(tiered, "abcd", 4)
    tiered.demote_all()
    assert looked_up(tiered, "abcdxy") == (4, 4, [[], [(4, "cpu", "redis")]])
    tiered.manager.clear({Tier.CPU})
    assert looked_up(tiered, "abcdxy") == (4, 4, [[], [(4, "redis")]])
    tiered.manager.dropped(0.0, tiered.redis, [state_name(tiered.hashes("abcd")[-1])])
    assert looked_up(tiered, "abcdxy") == (0, 4, [[], []])
    assert nodes_of(tiered, None, None, 3, 10)[2, 4] == ([], 0, 0), "remembered states are no landing"


@settings(max_examples=60, deadline=None)
@given(
    saved=st.lists(st.tuples(st.text("ab", min_size=1, max_size=9), st.integers(1, 9)), max_size=12),
    lost=st.lists(st.tuples(st.text("ab", min_size=1, max_size=9), st.booleans()), max_size=3),
    asked=st.text("ab", min_size=1),
)
def test_a_lookup_says_how_far_a_plan_would_load(brain_with, saved, lost, asked):
    brain = brain_with(budget=1000)
    for text, boundary in saved:
        brain.serve(text)
        if boundary <= len(text):
            save_states(brain, text[:boundary])
    for text, states in lost:
        key = state_name(brain.hashes(text)[-1]) if states else brain.keys(text)[-1]
        brain.manager.dropped(brain.now, brain.cpu, [key])
    said, _, marks = looked_up(brain, asked)
    assert said == landing(plan(brain, asked))[1]
    assert said == max((end for segment in marks for end, _ in segment if end < len(asked)), default=0)


def test_a_lookup_hashes_no_more_than_the_blocks_that_are_known(brain, monkeypatch):
    """A prompt of a million tokens of which nothing is stored costs what it always did."""
    store(brain, "abcdef", 6)
    hashed = []
    monkeypatch.setattr("kvmanager.report.state_name", lambda block: hashed.append(block) or state_name(block))
    assert looked_up(brain, "abcdef" + "z" * 5_000)[0] == 6
    assert len(hashed) == 6
    brain.manager.lookup(brain.hashes("abcdef"))
    assert len(hashed) == 6, "of a model without states none"


def test_states_are_landings_of_their_segment_in_the_trie_and_no_nodes(brain_with):
    brain = brain_with(budget=100)
    store(brain, "abcdef", 3, 4, 6)
    brain.serve("abcdx")
    found = nodes_of(brain, None, None, 9, 10)
    assert found == {
        (0, 2): ([], 1, 0),
        (2, 4): ([(3, "cpu"), (4, "cpu")], 2, 0),
        (4, 6): ([(6, "cpu")], 0, 0),
        (4, 5): ([], 0, 0),
    }
    views = brain.manager.views
    below = [(one.segments_below, one.blocks_below) for one in views.tree(None, None, 2, 10).shown]
    assert below == [(3, 5), (2, 3)], "states are no tokens"
    assert views.tree(None, state_name(brain.hashes("abcd")[-1]), 3, 10) is None


@pytest.mark.parametrize(("depth", "most"), [(2, 10), (9, 2)], ids=["the depth", "the number of nodes"])
def test_the_last_nodes_of_a_picture_have_their_landings_too(brain_with, depth, most):
    brain = brain_with(budget=100)
    store(brain, "abcdef", 3, 4, 6)
    assert nodes_of(brain, None, None, depth, most)[2, 4] == ([(3, "cpu"), (4, "cpu")], 1, 1)


def test_the_search_for_landings_is_bounded(brain_with, monkeypatch):
    monkeypatch.setattr(tree_module, "MOST_LOOKED_AT", 8)
    brain = brain_with(budget=1000)
    store(brain, "ab", 2)
    for number in range(30):
        brain.serve("ab" + chr(200 + number))
    tree = brain.manager.views.tree(None, None, 1, 10)
    assert tree.looked_at <= 8 + tree_module.MOST_COUNTED + tree_module.LEAST_COUNTED
    (root,) = tree.shown
    assert (root.states, root.hidden) == ([], 31), "not found among so few, and still counted"
    plan(brain, "abz")
    (root,) = brain.manager.views.tree(None, None, 1, 10).shown
    assert len(root.states) == 1, "states that a load has used come first"


def test_another_tenant_sees_no_landing(brain_with):
    brain = brain_with(budget=100)
    store(brain, "abcd", 4, tenant="mine")
    store(brain, "wxyz", 2, tenant="theirs")
    assert nodes_of(brain, "mine", None, 9, 10)[2, 4][0] == [(4, "cpu")]
    theirs = nodes_of(brain, "theirs", None, 9, 10)
    assert [marks for marks, _, _ in theirs.values()] == [[(2, "cpu")], []]
    mine = brain.manager.tenant_stats(0.0, "mine")["tiers"]["cpu"]
    assert (mine["states"], mine["state_bytes"], mine["segments"]) == (1, 1, 3)
    assert brain.manager.tenant_stats(0.0, "other")["tiers"]["cpu"]["states"] == 0


def test_the_tiers_books_count_states_and_their_bytes_while_they_are_there(tiered):
    def books():
        return [(place["states"], place["state_bytes"]) for place in tiered.manager.stats(0.0)["locations"]]

    tiered.serve("xy")
    assert books() == [(0, 0), (0, 0)]
    store(tiered, "abcd", 2, 4)
    tiered.demote_all()
    assert books() == [(2, 2), (2, 2)]
    tiered.manager.dropped(0.0, tiered.cpu, [state_name(tiered.hashes("ab")[-1])])
    assert books() == [(1, 1), (2, 2)]
    tiered.manager.clear({Tier.REDIS})
    assert books() == [(1, 1), (0, 0)]


def test_a_stored_segment_says_that_it_is_of_states(brain):
    hashes = brain.hashes("ab")
    names = [*hashes, state_name(hashes[-1])]
    (span,) = split_segments(names, 2, 3, 2, 3)
    assert span.kind is NodeKind.STATE
    assert [one.kind for one in split_segments([*hashes, hashes[0]], 0, 3, 2, 2)] == [
        NodeKind.REQUEST,
        NodeKind.ANSWER,
    ]
    header = SegmentHeader.raw(span, names[2], bytes(32), (1, 2, 1, 1, 8), "uint8")
    sealed = bytearray(head_bytes(1))
    write_header(memoryview(sealed), header, bytes(16))
    assert read_header(sealed).span == span


@pytest.mark.parametrize(("tokens", "kind"), [(1, NodeKind.STATE), (32, NodeKind.REQUEST)], ids=["states", "fp8"])
def test_states_that_were_stored_as_blocks_of_tokens_are_known_by_their_form(brain, tokens, kind):
    """A block of bytes is one of fp8 KV too, which has more tokens than one."""
    hashes = brain.hashes("abc")
    (span,) = split_segments(hashes, 2, 3, 2, 3)
    assert span.kind is NodeKind.REQUEST
    sealed = bytearray(head_bytes(1))
    write_header(
        memoryview(sealed), SegmentHeader.raw(span, hashes[2], bytes(32), (1, 2, tokens, 1, 8), "uint8"), bytes(16)
    )
    assert read_header(sealed).span == replace(span, kind=kind)


def test_a_manager_that_was_started_again_finds_landings_in_what_the_tiers_report(brain_with):
    """Those inside a segment too, of whose inner blocks no name is known any more."""
    first, second = brain_with(budget=100), brain_with(budget=100)
    store(first, "abcdef", 3)
    spans = [node.span for node in first.manager._catalog.trie.nodes.values()]
    assert len(second.manager.adopt(0.0, second.cpu, spans, [1] * len(spans))) == 4
    assert looked_up(second, "abcxyz") == (3, 3, [[], [(3, "cpu")]])
    assert nodes_of(second, None, None, 9, 10)[2, 4][0] == [(3, "cpu")]


@pytest.fixture(autouse=True)
def _room(brain, tiered):
    for each in (brain, tiered):
        each.manager.set_budget(each.cpu, 100)
