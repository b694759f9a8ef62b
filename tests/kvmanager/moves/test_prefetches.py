import pytest

from kvmanager.index.locations import Location, Tier
from kvmanager.moves.saves import MOST_ABOVE

OTHER = Location(Tier.CPU, "other")


@pytest.fixture
def cold(tiered):
    """ "abcdef" lies at Redis only, "uv" in the CPU tier only."""
    spans = tiered.spans("abcdef")
    tiered.manager.adopt(0, tiered.redis, spans, [2, 2, 2])
    tiered.serve("uv")
    return tiered


def prefetch(brain, keys, location=None):
    return brain.manager.prefetch(brain.now, "replica", location or brain.cpu, keys)


def commit(brain, keys, nbytes=2):
    return brain.manager.commit(brain.now, brain.cpu, keys, [nbytes] * len(keys))


def test_what_redis_holds_comes_back_parents_first(cold):
    offer = prefetch(cold, cold.keys("abcdef")[::-1])
    assert (offer.keys, offer.evict) == (cold.keys("abcdef"), ())
    assert cold.stored("abcdef") == 0
    assert commit(cold, offer.keys) == list(offer.keys)
    assert (cold.stored("abcdef"), cold.kept("abcdef")) == (6, 6)
    assert cold.counters()["promoted_segments"] == 3
    assert cold.manager.stats(0)["reservations"] == 0


def test_what_was_promoted_is_read_from_the_cpu_tier_and_not_copied_back(cold):
    cold.demote_all()
    commit(cold, prefetch(cold, cold.keys("abcdef")).keys)
    assert {segment.location for segment in cold.plan("abcdef").segments} == {cold.cpu}
    assert cold.next_demotion() is None


def test_room_is_reserved_for_what_is_raw_again_in_the_cpu_tier(tiered):
    spans = tiered.spans("abcd")
    tiered.manager.adopt(0, tiered.redis, spans, [1, 2], [3, 4])
    offer = prefetch(tiered, tiered.keys("abcd"))
    assert location_bytes(tiered, tiered.cpu) == (7, 7)
    assert location_bytes(tiered, tiered.redis) == (3, 0)
    assert tiered.manager.commit(0, tiered.cpu, offer.keys, [3, 4]) == list(offer.keys)
    assert [segment.nbytes for segment in tiered.plan("abcd").segments] == [3, 4]


def test_what_does_not_fit_raw_is_not_promoted_though_it_would_fit_coded(brain_with):
    brain = brain_with(budget=5, redis=20)
    brain.manager.adopt(0, brain.redis, brain.spans("abcd"), [1, 1], [3, 3])
    assert prefetch(brain, brain.keys("abcd")).keys == brain.keys("ab")


def test_a_demoted_segment_comes_back_in_its_own_size(tiered):
    tiered.manager.commit(0, tiered.cpu, tiered.offer("abcd", nbytes=3).keys, [3, 3])
    demotion = tiered.next_demotion()
    tiered.finish(demotion, dict.fromkeys(demotion.keys, 1))
    assert location_bytes(tiered, tiered.redis) == (2, 0)
    tiered.manager.clear({Tier.CPU})
    prefetch(tiered, tiered.keys("abcd"))
    assert location_bytes(tiered, tiered.cpu) == (6, 6)


def location_bytes(brain, location):
    (found,) = [
        store for store in brain.manager.stats(0)["locations"]
        if (store["tier"], store["holder"]) == (location.tier.value, location.holder)
    ]  # fmt: skip
    return found["bytes"], found["reserved_bytes"]


def test_nothing_is_promoted_twice_nor_over_a_save(cold):
    cold.offer("ab", nbytes=2)
    assert prefetch(cold, cold.keys("abcdef")).keys == cold.keys("abcdef")[1:]
    assert prefetch(cold, cold.keys("abcdef")).keys == ()


def test_what_redis_lacks_is_not_promoted(cold, brain):
    assert prefetch(cold, [*cold.keys("uv"), *cold.keys("xy")], OTHER).save_id == 0
    brain.serve("ab")
    assert prefetch(brain, brain.keys("ab"), OTHER).keys == ()


def test_what_redis_has_not_yet_got_is_not_promoted(cold):
    offer = cold.offer("xy", location=cold.redis)
    assert offer.keys == cold.keys("xy")
    assert prefetch(cold, offer.keys).keys == ()


def test_a_few_parents_that_redis_has_come_along(cold):
    """Else what follows them would never be kept here: neither what Redis has of it, nor what a replica computes."""
    offer = prefetch(cold, cold.keys("abcdef")[2:])
    assert offer.keys == cold.keys("abcdef")
    assert offer.above == tuple((key, 2) for key in cold.keys("abcd"))
    assert commit(cold, offer.keys) == list(offer.keys)
    assert prefetch(cold, cold.keys("uv")).above == ()


def test_a_segment_without_its_parent_is_refused(cold):
    text = "abcdefghijklmnop"
    cold.manager.adopt(0, cold.redis, cold.spans(text), [1] * 8)
    assert prefetch(cold, cold.keys(text)[MOST_ABOVE + 1 :]).keys == ()
    assert cold.counters()["refused_promotions"] == 8 - MOST_ABOVE - 1
    assert prefetch(cold, cold.keys(text)[MOST_ABOVE:]).keys[:MOST_ABOVE] == cold.keys(text)[:MOST_ABOVE]


def test_a_conversation_that_redis_kept_is_stored_again_though_another_one_began_alike_meanwhile(tiered):
    """Its first segment follows on a conversation's that nobody asks for any more."""
    for text in ("abcd", "aXYZ"):
        save(tiered, text)
    tiered.demote_all()
    tiered.manager.clear({Tier.CPU})
    save(tiered, "aUVW")
    hashes = tiered.hashes("aXYZ")
    segments = tiered.plan("aXYZ").segments
    assert [segment.location.tier for segment in segments] == [Tier.CPU, Tier.REDIS, Tier.REDIS]
    commit(tiered, prefetch(tiered, [segment.key for segment in segments if segment.location == tiered.redis]).keys, 1)
    assert tiered.manager.lookup(hashes)["cpu"] == 4
    save(tiered, "aXYZab")
    assert tiered.stored("aXYZab") == 6


def save(brain, text):
    """Store all that the CPU tier takes of a prompt, cut as it cuts."""
    spans = brain.manager.cut(brain.cpu, brain.hashes(text), 0, len(text), len(text))
    brain.commit(brain.manager.offer(brain.now, "replica", brain.cpu, spans, [1] * len(spans)).keys)


def test_colder_segments_make_room_and_hotter_ones_do_not(brain_with):
    brain = brain_with(budget=2, redis=20)
    brain.serve("uvwx")
    for _ in range(2):
        brain.plan("abcd")
    brain.manager.adopt(0, brain.redis, brain.spans("abcd"), [1, 1])
    brain.plan("abcd")
    offer = prefetch(brain, brain.keys("abcd"))
    assert offer.keys == brain.keys("abcd")
    assert [order.keys for order in offer.evict] == [brain.keys("uvwx")[::-1]]
    brain.manager.abandon(offer.save_id)
    for _ in range(20):
        brain.serve("uvwx")
    assert prefetch(brain, brain.keys("abcd")).keys == ()
    assert brain.counters()["refused_promotions"] == 2


def test_evictions_that_are_due_come_first(cold):
    plan = cold.plan("uv")
    cold.manager.clear({Tier.CPU})
    cold.manager.release(plan.lease_id)
    assert [order.keys for order in prefetch(cold, cold.keys("ab")).evict] == [cold.keys("uv")]


def test_a_promotion_ends_by_name_by_time_and_with_its_replica(cold):
    def abandon(offer):
        cold.manager.abandon(offer.save_id)

    def wait(offer):
        cold.now += 31.0
        cold.manager.expire(cold.now)

    def die(offer):
        cold.manager.forget_replica("replica")

    for end in (abandon, wait, die):
        offer = prefetch(cold, cold.keys("abcdef"))
        assert len(offer.keys) == 3
        end(offer)
        assert commit(cold, offer.keys) == []
        assert cold.manager.stats(cold.now)["locations"][0]["reserved_bytes"] == 0


def test_a_promotion_outlives_the_loss_of_redis(cold):
    offer = prefetch(cold, cold.keys("abcdef"))
    cold.manager.forget_holder(cold.redis)
    assert prefetch(cold, cold.keys("abcdef")).keys == ()
    assert commit(cold, offer.keys) == list(offer.keys)
    assert cold.stored("abcdef") == 6


def test_a_promotion_to_a_lost_node_stores_nothing(cold):
    offer = prefetch(cold, cold.keys("abcdef"))
    cold.manager.forget_holder(cold.cpu)
    assert commit(cold, offer.keys) == []
    assert prefetch(cold, cold.keys("abcdef")).keys == ()


# Plans over three tiers


def test_a_plan_takes_each_segment_from_the_nearest_place(cold):
    cold.manager.set_budget(OTHER, 10)
    cold.manager.adopt(0, OTHER, cold.spans("abcd"), [2, 2])
    cold.manager.adopt(0, cold.cpu, cold.spans("ab"), [2])
    plan = cold.plan("abcdef")
    assert [segment.location for segment in plan.segments] == [cold.cpu, OTHER, cold.redis]
    assert [segment.nbytes for segment in plan.segments] == [2, 2, 2]
    assert (cold.counters()["cpu_blocks"], cold.counters()["redis_blocks"]) == (4, 2)


def test_the_copies_that_a_plan_names_are_leased_and_no_others(cold):
    commit(cold, prefetch(cold, cold.keys("ab")).keys)
    cold.plan("abcdef")
    directives = cold.manager.clear({Tier.CPU, Tier.REDIS})
    assert {order.source: set(order.keys) for order in directives} == {
        cold.cpu: set(cold.keys("uv")),
        cold.redis: set(cold.keys("ab")),
    }


# Redis is indexed again


def test_redis_is_adopted_in_chunks_beside_what_is_known_already(tiered):
    for _ in range(5):
        tiered.plan("abcdef")
        tiered.commit(tiered.offer("ab").keys)
    uses = [segment["uses"] for segment in tiered.manager.lookup(tiered.hashes("abcdef"))["segments"]]
    offer = tiered.offer("abcdef")  # refused or not: known as ghosts from now on
    tiered.manager.abandon(offer.save_id)
    spans = tiered.spans("abcdefgh")
    for chunk in (spans[:1], spans[1:3], spans[3:]):
        assert tiered.manager.adopt(0, tiered.redis, chunk, [1] * len(chunk)) == [span.key for span in chunk]
    assert tiered.kept("abcdefgh") == 8
    after = [segment["uses"] for segment in tiered.manager.lookup(tiered.hashes("abcdef"))["segments"]]
    assert after[: len(uses)] == uses


def test_a_chunk_whose_parents_were_refused_is_refused(brain_with):
    brain = brain_with(redis=1)
    spans = brain.spans("abcdef")
    assert [len(brain.manager.adopt(0, brain.redis, [span], [1])) for span in spans] == [1, 0, 0]
