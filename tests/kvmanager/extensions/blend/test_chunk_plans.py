"""Plans of blended prompts: the chunks behind the prefix, one lease for all, what is counted and used.

A block is one letter here, and one token; a segment holds two.
"""

import pytest

from kvmanager.extensions.blend.chunks import BLEND, BLENDS, BlendQuery, BlendTerms, ChunkQuery
from kvmanager.extensions.blend.plans import AllChunks, BlendPlans, ChosenChunks
from kvmanager.index.locations import Tier
from kvmanager.moves.plan import PlanQuery, PlanReason


class ToldChoice(AllChunks):
    """As `AllChunks`, but for what a test's function says."""

    choose_chunks = None

    def choose(self, choice, query, own, chunks):
        if self.choose_chunks is None:
            return super().choose(choice, query, own, chunks)
        return ChosenChunks(*self.choose_chunks(own.blocks, own.reason, chunks))


@pytest.fixture
def told_brain(brain_with):
    def make(**settings):
        told = ToldChoice()
        made = brain_with(extensions=(BlendPlans(told),), **settings)
        made.told = told
        return made

    return make


@pytest.fixture
def letters(told_brain):
    return told_brain(budget=40, block_tokens=1)


def chunked(brain, prompt, *chunks):
    """Queries for chunks where they stand in a prompt."""
    return [ChunkQuery(prompt.index(text), len(text), brain.hashes(text)) for text in chunks]


def plan(brain, prompt, *chunks, device=0, choose_chunks=None):
    return plan_of(brain, prompt, chunked(brain, prompt, *chunks), device, choose_chunks)


def plan_of(brain, prompt, chunks, device=0, choose_chunks=None):
    extras = {BLEND: BlendQuery(chunks, 0.25, BlendTerms(1, 4))}
    query = PlanQuery(brain.hashes(prompt), device_blocks=device, extras=extras)
    brain.told.choose_chunks = choose_chunks
    return brain.manager.plan(brain.now, "replica", "node", query)


def chunks_of(made):
    return made.extras[BLEND].chunks if BLEND in made.extras else ()


def found(made):
    return [(chunk.start_token, chunk.blocks) for chunk in chunks_of(made)]


def test_chunks_are_found_in_any_order_behind_what_is_no_prefix(letters):
    for text in ("abcd", "efgh"):
        letters.serve(text)
    made = plan(letters, "sefghabcdq", "efgh", "abcd")
    assert found(made) == [(1, 4), (5, 4)]
    assert [segment.key for segment in chunks_of(made)[0].loads] == list(letters.keys("efgh"))
    assert [segment.start_block for segment in chunks_of(made)[1].loads] == [0, 2]
    assert (made.segments, made.reason) == ((), BLENDS)


def test_of_a_chunk_its_leading_stored_blocks_are_planned(letters):
    letters.serve("abcd")
    assert found(plan(letters, "xxabcdefyy", "abcdef")) == [(2, 4)]
    assert found(plan(letters, "xxabzyyyyy", "abz")) == [(2, 2)]
    assert found(plan(letters, "xxbcdyyyyy", "bcd")) == []


def test_the_prompts_own_chain_comes_first_and_exempts_what_it_brings(letters):
    for text in ("sabc", "ab", "bcde", "fg"):
        letters.serve(text)
    # own: "sabc", 4 tokens; "ab" ends within them, "cdef" begins at 3 and straddles, "fg" lies behind
    letters.serve("cdef")
    made = plan(letters, "sabcdeffg", "ab", "cdef", "fg")
    assert [segment.end_block for segment in made.segments] == [2, 4]
    assert found(made) == [(3, 4), (7, 2)]


def test_what_the_device_has_is_prefix_too(letters):
    letters.serve("abcd")
    letters.serve("efgh")
    assert found(plan(letters, "abcdefgh", "abcd", "efgh", device=4)) == [(4, 4)]
    assert found(plan(letters, "xabcdefgh", "abcd", "efgh", device=9)) == []


def test_a_stored_part_that_ends_with_the_prefix_is_not_planned(letters):
    letters.serve("abcd")
    assert found(plan(letters, "abcdeyy", "abcde")) == []


def test_without_chunks_a_plan_is_what_it_was(letters):
    letters.serve("abcd")
    made = plan(letters, "abcdx")
    assert (made.reason, found(made), len(made.segments)) == (PlanReason.HIT, [], 2)
    assert plan(letters, "zzz", "zz").reason is PlanReason.COLD


def test_all_is_under_one_lease_that_keeps_it_until_it_is_released_once(letters):
    for text in ("sx", "abcd", "efgh"):
        letters.serve(text)
    made = plan(letters, "sxefghabcd", "efgh", "abcd")
    assert letters.manager.stats(0.0)["leases"] == 1
    ordered = [key for order in letters.manager.clear({Tier.CPU}) for key in order.keys]
    assert ordered == [], "nothing leaves that is under the lease"
    letters.manager.release(made.lease_id)
    letters.manager.release(made.lease_id)
    assert sorted(letters.evicted()) == sorted(letters.keys("sx") + letters.keys("abcd") + letters.keys("efgh"))


def test_a_lease_may_be_for_chunks_only_and_ends_with_its_time(letters):
    letters.serve("abcd")
    made = plan(letters, "xxabcdyy", "abcd")
    assert made.lease_id
    assert not made.segments
    assert [key for order in letters.manager.clear({Tier.CPU}) for key in order.keys] == []
    letters.now = 31.0
    assert sorted(letters.evicted()) == sorted(letters.keys("abcd"))


def test_a_chunk_that_comes_twice_is_leased_and_freed_with_both(letters):
    letters.serve("abcd")
    chunks = [ChunkQuery(at, 4, letters.hashes("abcd")) for at in (1, 5)]
    made = plan_of(letters, "xabcdabcdy", chunks)
    assert found(made) == [(1, 4), (5, 4)]
    letters.manager.clear({Tier.CPU})
    letters.manager.release(made.lease_id)
    assert sorted(letters.evicted()) == sorted(letters.keys("abcd"))


def test_a_leased_chunk_is_not_evicted_to_make_room(told_brain):
    brain = told_brain(budget=2, block_tokens=1)
    brain.serve("abcd")
    made = plan(brain, "xxabcdyy", "abcd")
    for text in ("ghij", "ghij", "ghij"):
        brain.serve(text)
    assert brain.stored("abcd") == 4
    brain.manager.release(made.lease_id)
    for _ in range(8):
        brain.serve("ghij")
    assert brain.stored("abcd") < 4


def test_uses_of_chunks_count_as_those_of_a_prefix_and_once_a_prompt(letters):
    letters.serve("abcd")
    uses = lambda: [part["uses"] for part in letters.manager.lookup(letters.hashes("abcd"))["segments"]]  # noqa: E731
    before = uses()
    chunks = [ChunkQuery(at, 4, letters.hashes("abcd")) for at in (1, 5)]
    plan_of(letters, "xabcdabcdy", chunks)
    assert all(0.9 < after - first < 1.01 for after, first in zip(uses(), before, strict=True))
    letters.manager.stored_blocks([letters.hashes("abcd")])
    assert all(0.9 < after - first < 1.01 for after, first in zip(uses(), before, strict=True))


def test_what_is_chosen_of_the_chunks_is_leased_and_no_more(letters):
    for text in ("abcd", "efgh"):
        letters.serve(text)
    seen = []

    def choose(blocks, reason, chunks):
        seen.append((blocks, reason, list(chunks)))
        return chunks[1:], BLENDS

    made = plan(letters, "xefghabcd", "efgh", "abcd", choose_chunks=choose)
    assert (seen[0][0], seen[0][1], len(seen[0][2])) == (0, PlanReason.COLD, 2)
    assert found(made) == [(5, 4)]
    ordered = {key for order in letters.manager.clear({Tier.CPU}) for key in order.keys}
    assert ordered == set(letters.keys("efgh"))


def test_chunks_that_are_refused_leave_the_plan_as_its_own_chain_made_it(letters):
    letters.serve("abcd")
    made = plan(letters, "xabcd", "abcd", choose_chunks=lambda *_: ((), PlanReason.RECOMPUTE_FASTER))
    assert (made.lease_id, chunks_of(made), made.reason) == (0, (), PlanReason.RECOMPUTE_FASTER)
    assert letters.manager.stats(0.0)["leases"] == 0


def test_chunks_that_overlap_the_one_before_are_ignored(letters):
    letters.serve("abcd")
    letters.serve("cdef")
    chunks = [ChunkQuery(1, 4, letters.hashes("abcd")), ChunkQuery(3, 4, letters.hashes("cdef"))]
    assert found(plan_of(letters, "xabcdefy", chunks)) == [(1, 4)]


def test_tokens_asked_and_found_are_counted_of_prompts_with_two_chunks(letters):
    for text in ("abcd", "ef"):
        letters.serve(text)
    plan(letters, "xabcdyy", "abcd")
    assert (letters.counters()["chunk_tokens_asked"], letters.counters()["chunk_tokens_found"]) == (0, 0)
    plan(letters, "abcdefghy", "abcd", "efgh")  # the first is the prompt's own beginning
    assert (letters.counters()["chunk_tokens_asked"], letters.counters()["chunk_tokens_found"]) == (8, 6)
    plan(letters, "xabcdefghy", "abcd", "efgh", choose_chunks=lambda *_: ((), PlanReason.RECOMPUTE_FASTER))
    assert (letters.counters()["chunk_tokens_asked"], letters.counters()["chunk_tokens_found"]) == (16, 12)


def test_blocks_of_chunks_count_at_their_tier(letters):
    letters.serve("xx")
    letters.serve("xabc")
    before = letters.counters()["cpu_blocks"]
    plan(letters, "xxxabcy", "xabc")  # "xx" is the prefix, and the chunk begins behind it
    assert letters.counters()["cpu_blocks"] == before + 6
    plan(letters, "xxaxy", "xaxy", device=2)  # of "xa" a block lies before the end of the prefix
    assert letters.counters()["cpu_blocks"] == before + 7


def test_how_much_is_stored_of_sequences_is_told_without_lease_or_use(letters):
    letters.serve("abcd")
    texts = ("abcd", "abxx", "zz", "abcdef", "")
    assert letters.manager.stored_blocks([letters.hashes(text) for text in texts]) == [4, 2, 0, 4, 0]
    assert letters.manager.stats(0.0)["leases"] == 0
