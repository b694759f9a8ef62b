import pytest

from kvmanager.config import ManagerConfig
from kvmanager.eviction.policies import EvictionPolicy, PolicySetting, find_policy, make_policy, policy_names
from kvmanager.eviction.policies.lfu import DecayedLfu
from kvmanager.eviction.reuse_model import ReuseModel
from kvmanager.index.deltas import NOTHING_SEEN, Position
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanReason


def test_a_segment_is_planned_only_after_its_commit(brain):
    offer = brain.offer("abcd")
    assert brain.plan("abcd").reason is PlanReason.EVICTED
    assert brain.commit(offer.keys) == list(offer.keys)
    plan = brain.plan("abcdef")
    assert [(segment.start_block, segment.num_blocks) for segment in plan.segments] == [(0, 2), (2, 2)]
    assert plan.reason is PlanReason.HIT


def test_a_plan_says_why_it_is_empty(brain):
    assert brain.plan("abcd").reason is PlanReason.COLD
    brain.serve("abcd")
    assert brain.plan("abcd", device=4).reason is PlanReason.DEVICE
    brain.manager.dropped(0, brain.cpu, [span.key for span in brain.spans("abcd")])
    assert brain.plan("abcd").reason is PlanReason.EVICTED


def test_a_segment_that_straddles_the_device_prefix_is_included(brain):
    brain.serve("abcd")
    plan = brain.plan("abcd", device=1)
    assert [segment.start_block for segment in plan.segments] == [0, 2]
    assert brain.counters()["device_blocks"] == 1
    assert brain.counters()["cpu_blocks"] == 3


def test_a_plan_tells_the_hotness_of_all_that_the_prompt_begins_with(brain):
    brain.serve("ab")
    brain.serve("abcd")
    plan = brain.plan("abcdef", device=4)
    assert [end for end, _ in plan.scores] == [2, 4]
    (_, head), (_, tail) = plan.scores
    assert plan.now < tail < head
    for segment, (_, score) in zip(brain.manager.lookup(brain.hashes("abcd"))["segments"], plan.scores, strict=True):
        assert segment["uses"] == pytest.approx(2 ** (score - plan.now))


def test_a_plan_tells_the_hotness_of_ghosts_too(brain):
    brain.serve("abcd")
    brain.manager.dropped(0, brain.cpu, brain.keys("abcd")[1:])
    assert [end for end, _ in brain.plan("abcd").scores] == [2, 4]
    brain.manager.clear({Tier.CPU})
    assert [end for end, _ in brain.plan("abcd").scores] == [2, 4]
    assert brain.plan("uv").scores == ()


def test_the_scores_of_two_cuts_of_the_same_tokens_are_in_order(brain):
    brain.serve("abc")
    brain.manager.abandon(brain.offer("abcd").save_id)
    ends = [end for end, _ in brain.plan("abcd").scores]
    assert ends == sorted(ends) == [2, 3, 4]


def test_a_child_committed_first_waits_for_its_parent(brain):
    first, second = brain.offer("abcd").keys
    assert brain.commit([second]) == [second]
    assert brain.stored("abcd") == 0
    assert brain.manager.deltas_since(NOTHING_SEEN, 1).part.events == []
    brain.commit([first])
    assert brain.stored("abcd") == 4


def test_a_child_whose_parent_never_comes_is_evicted(brain):
    offer = brain.offer("abcd")
    brain.commit(offer.keys[1:])
    brain.manager.abandon(offer.save_id)
    (directive,) = brain.manager.expire(0)
    assert directive.keys == offer.keys[1:]


def test_nobody_stores_a_segment_twice(brain):
    first = brain.offer("abcd")
    assert brain.offer("abcd").keys == ()
    brain.manager.abandon(first.save_id)
    assert brain.offer("abcd").keys == first.keys


def test_a_reservation_that_nobody_commits_ends_by_itself(brain):
    offer = brain.offer("abcd")
    brain.now = 31.0
    assert brain.commit(offer.keys) == []
    assert brain.offer("abcd").keys == offer.keys
    assert brain.counters()["expired_reservations"] == 1


def test_what_a_plan_handed_out_is_not_evicted_until_released(brain_with):
    brain = brain_with(budget=2)
    brain.serve("abcd")
    plan = brain.plan("abcd")
    for _ in range(20):
        assert brain.serve("uvwx") == 0
    assert brain.stored("abcd") == 4
    brain.manager.release(plan.lease_id)
    brain.manager.release(plan.lease_id)
    brain.serve("uvwx")
    assert brain.stored("uvwx") == 4


def test_a_lease_that_nobody_releases_ends_by_itself(brain_with):
    brain = brain_with(budget=2)
    brain.serve("abcd")
    brain.plan("abcd")
    brain.now = 31.0
    for _ in range(20):
        brain.serve("uvwx")
    assert brain.stored("uvwx") == 4
    assert brain.counters()["expired_leases"] == 1


def test_clearing_a_tier_spares_what_is_leased_until_the_lease_ends(brain):
    brain.serve("abcd")
    brain.serve("uv")
    plan = brain.plan("abcd")
    (directive,) = brain.manager.clear({Tier.CPU})
    assert directive.keys == tuple(span.key for span in brain.spans("uv"))
    assert brain.stored("abcd") == 0
    brain.manager.release(plan.lease_id)
    (directive,) = brain.manager.expire(0)
    assert set(directive.keys) == {span.key for span in brain.spans("abcd")}


def test_leaves_go_before_what_they_continue(brain_with):
    brain = brain_with(budget=3)
    brain.serve("abcdef")
    for _ in range(3):
        brain.serve("uv")
    assert brain.stored("abcdef") == 4
    assert brain.stored("uv") == 2


def test_a_scan_does_not_push_out_what_is_used_again(brain_with):
    brain = brain_with(budget=4)
    for _ in range(5):
        brain.serve("abcd")
    for letter in range(60):
        brain.serve(chr(1000 + letter) * 4)
    assert brain.serve("abcd") == 4


def test_a_new_segment_takes_the_place_of_one_used_once_before(brain_with):
    brain = brain_with(budget=2)
    brain.serve("abcd")
    brain.serve("uvwx")
    assert brain.stored("uvwx") == 4


def test_an_old_favourite_leaves_in_the_end(brain_with):
    brain = brain_with(budget=2, half_life_requests=10)
    for _ in range(5):
        brain.serve("abcd")
    for letter in range(60):
        brain.serve(chr(1000 + letter) * 4)
    assert brain.stored("abcd") == 0


def test_hotness_survives_eviction(brain_with):
    brain = brain_with(budget=2)
    for _ in range(5):
        brain.serve("abcd")
    brain.manager.clear({Tier.CPU})
    for _ in range(3):
        brain.serve("uvwx")
    brain.serve("abcd")
    assert brain.stored("abcd") == 4


def test_a_refused_segment_is_remembered_and_comes_back_stronger(brain_with):
    brain = brain_with(budget=2)
    for _ in range(3):
        brain.serve("abcd")
    served = 0
    while not brain.stored("uvwx"):
        brain.serve("uvwx")
        served += 1
    assert 2 <= served <= 4
    assert brain.counters()["refused_colder"] >= 1


def test_ghosts_are_bounded_and_the_coldest_go_first(brain_with):
    brain = brain_with(budget=0, max_ghosts=10)
    for _ in range(4):
        brain.serve("abcd")
    for letter in range(100):
        brain.serve(chr(1000 + letter) * 4)
        stats = brain.manager.stats(0)
        assert stats["nodes"] == stats["ghosts"] <= 10
    assert brain.plan("abcd").reason is PlanReason.EVICTED
    assert brain.plan(chr(1000) * 4).reason is PlanReason.COLD


def test_a_segment_larger_than_the_budget_evicts_nothing(brain):
    brain.serve("abcdef")
    for _ in range(5):
        brain.plan("uv")
    assert brain.offer("uv", nbytes=11).keys == ()
    assert brain.stored("abcdef") == 6


def test_room_that_does_not_suffice_is_not_made(brain_with):
    brain = brain_with(budget=6)
    for _ in range(5):
        brain.serve("abcd")
    brain.serve("efgh")
    before = brain.manager.stats(0)["locations"]
    brain.plan("uv")
    offer = brain.offer("uv", nbytes=5)
    assert (offer.keys, offer.evict) == ((), ())
    assert brain.manager.stats(0)["locations"] == before
    assert brain.plan("efgh").reason is PlanReason.HIT


def test_a_commit_larger_than_its_reservation_is_refused(brain):
    offer = brain.offer("ab")
    assert brain.manager.commit(0, brain.cpu, offer.keys, [2]) == []
    assert brain.counters()["refused_commits"] == 1


def test_a_commit_that_nobody_reserved_is_refused(brain):
    assert brain.commit([span.key for span in brain.spans("ab")]) == []


def test_a_second_cut_of_the_same_tokens_hides_nothing(brain):
    # "abc" + "d" were cut where a prompt of three blocks ended; "ab" is stored beside them as another prompt's end.
    for text, prompt in (("abcd", 1), ("ab", 2)):
        spans = brain.spans(text, prompt=prompt)
        offer = brain.manager.offer(0, "replica", brain.cpu, spans, [1] * len(spans))
        brain.commit(offer.keys)
    assert brain.serve("abcd") == 4


def test_a_replica_that_dies_gives_back_its_leases_and_saves(brain):
    brain.serve("abcd")
    brain.plan("abcd")
    brain.offer("uv")
    brain.manager.device_stored("replica", brain.hashes("ab"))
    brain.manager.forget_replica("replica")
    stats = brain.manager.stats(0)
    assert (stats["leases"], stats["reservations"]) == (0, 0)
    assert brain.manager.lookup(brain.hashes("ab"))["device"] == {}
    assert brain.offer("uv").keys


def test_losing_one_location_orphans_nothing_at_another(brain):
    brain.manager.set_budget(brain.redis, 10)
    brain.serve("abcd")
    brain.serve("abcd", location=brain.redis)
    brain.manager.forget_holder(brain.cpu)
    plan = brain.plan("abcd")
    assert [segment.location for segment in plan.segments] == [brain.redis] * 2


def test_losing_a_location_tells_of_nothing_that_was_never_told(brain):
    brain.offer("abcd")
    brain.manager.forget_holder(brain.cpu)
    assert brain.manager.deltas_since(Position(0), 10).events == []


def test_a_lost_location_may_come_back_and_its_saves_and_leases_end_without_harm(brain):
    brain.serve("abcd")
    plan, offer = brain.plan("abcd"), brain.offer("uv")
    brain.manager.forget_holder(brain.cpu)
    brain.manager.set_budget(brain.cpu, 10)
    assert brain.commit(offer.keys) == []
    assert brain.serve("abcd") == 0
    brain.manager.release(plan.lease_id)
    brain.manager.abandon(offer.save_id)
    assert brain.evicted() == []
    assert brain.stored("abcd") == 4


def test_a_plan_prefers_the_readers_own_node(brain):
    other = Location(Tier.CPU, "other")
    for location in (brain.redis, other):
        brain.manager.set_budget(location, 10)
        brain.serve("ab", location=location)
    assert brain.plan("ab").segments[0].location == other
    brain.serve("ab")
    assert brain.plan("ab").segments[0].location == brain.cpu


def test_a_new_manager_adopts_what_a_tier_still_holds(brain, brain_with):
    brain.serve("abcdef")
    heir = brain_with()
    spans = brain.spans("abcdef")
    assert heir.manager.adopt(0, heir.cpu, spans[::-1], [1] * 3) == [span.key for span in spans]
    assert heir.serve("abcdef") == 6


def test_what_lost_its_head_is_not_adopted(brain):
    spans = brain.spans("abcdef")[1:]
    assert brain.manager.adopt(0, brain.cpu, spans, [1] * 2) == []


def test_adoption_respects_the_budget(brain_with):
    brain = brain_with(budget=2)
    assert len(brain.manager.adopt(0, brain.cpu, brain.spans("abcdef"), [1] * 3)) == 2


def test_answers_and_requests_are_told_apart(brain):
    spans = brain.spans("abcd", prompt=1)
    brain.commit(brain.manager.offer(0, "replica", brain.cpu, spans, [1] * 3).keys)
    segments = brain.manager.lookup(brain.hashes("abcd"))["segments"]
    assert [(found["kind"], found["num_blocks"]) for found in segments] == [
        ("request", 1),
        ("answer", 1),
        ("answer", 2),
    ]


def test_a_span_cut_otherwise_than_configured_is_refused(brain_with):
    brain = brain_with()
    other = KVManager(ManagerConfig(1), epoch=2)
    other.set_budget(brain.cpu, 10)
    with pytest.raises(ValueError, match="crosses a multiple"):
        other.offer(0, "replica", brain.cpu, brain.spans("abcd"), [1, 1])


def test_of_what_was_stored_with_longer_segments_what_fits_is_adopted(brain):
    heir = KVManager(ManagerConfig(1), epoch=2)
    heir.set_budget(brain.cpu, 10)
    fitting, longer = brain.spans("a"), brain.spans("abcd")
    assert heir.adopt(0, brain.cpu, [*longer, *fitting], [1] * 3) == [fitting[0].key]


def test_a_device_is_no_place_to_store_segments(brain):
    with pytest.raises(ValueError, match="device pool"):
        brain.manager.set_budget(Location(Tier.DEVICE, "replica"), 1)


def test_a_budget_below_what_is_held_is_refused(brain):
    brain.serve("abcd")
    with pytest.raises(ValueError, match="clear"):
        brain.manager.set_budget(brain.cpu, 1)


class Unfinished(EvictionPolicy):
    pass


class WithoutSetting(DecayedLfu):
    def __init__(self):
        pass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nope", r"unknown eviction policy 'nope': choose one of lfu"),
        ("no.such.module:Policy", "cannot be imported: ModuleNotFoundError"),
        ("kvmanager.eviction.policies.lfu:Nope", "cannot be imported: AttributeError"),
        (":Policy", "cannot be imported: ValueError"),
        ("kvmanager.config:ManagerConfig", "is no subclass of"),
        ("kvmanager.eviction.policies:make_policy", "is no subclass of"),
        (f"{__name__}:Unfinished", "lacks methods that every policy has: admits, expose, shield, used, victim"),
        (f"{__name__}:WithoutSetting", "cannot be made: TypeError"),
    ],
)
def test_a_policy_that_is_none_is_refused_in_one_sentence(brain_with, name, message):
    with pytest.raises(ValueError, match=message) as refused:
        brain_with(eviction_policy=name)
    assert "\n" not in str(refused.value)


def test_a_policy_is_found_by_name_or_as_a_class():
    assert policy_names()[0] == "lfu"
    setting = PolicySetting(HotnessClock(1.0), lambda: 10, seed=0, reuse=ReuseModel())
    for name in policy_names():
        assert isinstance(make_policy(name, setting), EvictionPolicy)
    assert find_policy("kvmanager.eviction.policies.lfu:DecayedLfu") is DecayedLfu
    assert isinstance(make_policy("kvmanager.eviction.policies.lfu:DecayedLfu", setting), DecayedLfu)


@pytest.mark.parametrize("settings", [{"blocks_per_segment": 0}, {"lease_s": 0}, {"save_s": -1}, {"max_ghosts": -1}])
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ValueError, match="must"):
        ManagerConfig(**{"blocks_per_segment": 2, **settings})
