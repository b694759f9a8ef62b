"""Sparse copies at Redis: only who presents these budgets is planned for them, and nobody takes one for dense KV."""

import pytest
from made_choices import Chosen

from kvmanager.extensions.sparse.budgets import Budgets
from kvmanager.extensions.sparse.retained_prefixes import SPARSE, kept_digest, serves
from kvmanager.moves.plan import PlanQuery, PlanReason

HALF = Budgets.uniform("50", 3)
BLOCK_TOKENS = 32
OTHER = Budgets.uniform("20", 3)


def form(budgets, number=1):
    return budgets.header_level.to_bytes(2, "little") + bytes([number]) * 16


@pytest.fixture
def cold(tiered):
    """ "abcdefgh" lies at Redis only, sparse but for its second segment."""
    spans = tiered.spans("abcdefgh")
    tiered.manager.adopt(0, tiered.redis, spans, [1] * 4, [2] * 4)
    forms = [form(HALF, 1), b"", form(HALF, 2), form(HALF, 3)]
    tiered.manager.forms.note(dict(zip(tiered.keys("abcdefgh"), forms, strict=True)))
    return tiered


def plan(brain, text, budgets=HALF, least=0, most=None, choose=None):
    hashes = brain.hashes(text)
    tokens = (len(hashes) if most is None else most) * BLOCK_TOKENS + 1
    query = PlanQuery(hashes[:most], prompt_tokens=tokens, extras={SPARSE: budgets} if budgets else {})
    choice = Chosen(choose, device_tokens=least * BLOCK_TOKENS)
    return brain.manager.plan(brain.now, "replica", "node", query, choice)


def sparse_of(plan):
    return plan.extras.get(SPARSE)


def test_who_presents_these_budgets_is_planned_for_what_they_keep(cold):
    found = plan(cold, "abcdefgh")
    assert [load.key for load in sparse_of(found).loads] == list(cold.keys("abcdefgh"))
    assert sparse_of(found).kept == ((1, 1, 1), (2, 2, 2), (1, 1, 1), (1, 1, 1)), "of a dense one all"
    assert sparse_of(found).forms == (form(HALF, 1), b"", form(HALF, 2), form(HALF, 3))
    assert sparse_of(found).digest == kept_digest(HALF, sparse_of(found).forms)
    assert found.lease_id
    cold.manager.release(found.lease_id)
    assert not cold.manager.stats(0)["leases"]


def test_nobody_else_is(cold):
    for budgets in (None, OTHER):
        found = plan(cold, "abcdefgh", budgets)
        assert (found.segments, sparse_of(found)) == ((), None)
    assert cold.manager.stored_blocks([cold.hashes("abcdefgh")]) == [0]


def test_a_lookup_counts_sparse_copies_and_says_which_they_are(cold):
    found = cold.manager.lookup(cold.hashes("abcdefg"))
    assert (found["cpu"], found["redis"], found["redis_in_any_form"]) == (0, 0, 7)
    assert [segment["has_other_form"] for segment in found["segments"]] == [True, False, True, True]
    assert cold.manager.lookup(cold.hashes("xy"))["redis_in_any_form"] == 0
    cold.manager.forms.note(dict.fromkeys(cold.keys("abcdefgh"), b""))
    dense = cold.manager.lookup(cold.hashes("abcdefg"))
    assert (dense["redis"], dense["redis_in_any_form"]) == (7, 7)
    cold.manager.dropped(0, cold.redis, cold.keys("abcdefgh")[1:2])
    assert cold.manager.lookup(cold.hashes("abcdefg"))["redis_in_any_form"] == 2, "up to the first gap"


def test_other_tokens_kept_give_another_digest(cold):
    before = sparse_of(plan(cold, "abcdefgh")).digest
    cold.manager.forms.note({cold.keys("abcdefgh")[2]: form(HALF, 9)})
    assert sparse_of(plan(cold, "abcdefgh")).digest != before
    assert kept_digest(HALF, [form(HALF)]) != kept_digest(OTHER, [form(HALF)])


@pytest.mark.parametrize(("most", "end"), [(8, 8), (7, 6), (2, 2), (1, 0)])
def test_a_prefix_is_whole_segments_and_leaves_a_token(cold, most, end):
    found = plan(cold, "abcdefgh", most=most)
    assert (sparse_of(found).blocks if sparse_of(found) else 0) == end


def test_a_prompt_that_parts_inside_a_segment_has_the_whole_ones_before_it(cold):
    assert sparse_of(plan(cold, "abcdefgX")).blocks == 6


def test_dense_kv_that_reaches_as_far_is_preferred(cold):
    cold.manager.commit(0, cold.cpu, cold.offer("abcd").keys, [1, 1])
    assert sparse_of(plan(cold, "abcd")) is None
    assert {segment.location for segment in plan(cold, "abcd").segments} == {cold.cpu}
    further = plan(cold, "abcdefgh")
    assert sparse_of(further).forms[:2] == (b"", b""), "what is nearer and dense is a part of it"
    assert sparse_of(plan(cold, "abcdefgh", least=8)) is None, "the device has as much"


def test_where_less_is_worth_a_load_it_is_less_or_dense(cold):
    found = plan(cold, "abcdefgh", choose=lambda segments: (2, PlanReason.PARTIAL))
    assert (len(sparse_of(found).loads), found.reason, len(sparse_of(found).kept)) == (2, PlanReason.PARTIAL, 2)
    none = plan(cold, "abcdefgh", choose=lambda segments: (0, PlanReason.RECOMPUTE_FASTER))
    assert (none.segments, sparse_of(none), none.lease_id) == ((), None, 0)
    less = plan(cold, "abcdefgh", least=4, choose=lambda segments: (2, PlanReason.PARTIAL))
    assert (less.segments, sparse_of(less)) == ((), None), "the device has as much"


def test_no_cpu_tier_is_given_room_for_one(cold):
    keys = cold.keys("abcdefgh")
    assert cold.manager.prefetch(0, "replica", cold.cpu, keys).keys == ()
    cold.manager.forms.note(dict.fromkeys(keys, b""))
    assert cold.manager.prefetch(0, "replica", cold.cpu, keys).keys == keys


def test_nor_for_a_dense_one_behind_it(cold):
    assert cold.manager.prefetch(0, "replica", cold.cpu, cold.keys("abcdefgh")[1:2]).keys == ()


def test_forms_of_what_is_not_there_are_no_error(tiered):
    tiered.manager.forms.note({tiered.keys("ab")[0]: form(HALF)})


def test_dense_kv_serves_everybody_and_sparse_only_its_budgets():
    assert serves(b"", None)
    assert serves(b"", HALF)
    assert serves(form(HALF), HALF)
    assert not serves(form(HALF), OTHER)
    assert not serves(form(HALF), None)
