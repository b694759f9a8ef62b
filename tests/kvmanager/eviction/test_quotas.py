import pytest

from kvmanager.eviction import quotas
from kvmanager.index.locations import Location, Tier
from kvmanager.segments.keys import tenant_tag
from kvmanager.segments.server_secret import ServerSecret

SECRET = ServerSecret(bytes(32))
A, B = tenant_tag(SECRET, "a"), tenant_tag(SECRET, "b")
OTHER_NODE = Location(Tier.CPU, "other")


def books(brain, location=0):
    """Bytes held and quota by tenant."""
    tenants = brain.manager.stats(brain.now)["locations"][location]["tenants"]
    return {tenant: (found["bytes"], found["quota_bytes"]) for tenant, found in tenants.items()}


def fill(brain, tenant, prompts, first=0):
    for number in range(prompts):
        brain.serve(f"{number + first}{tenant[:1]}."[:2], tenant=tenant)


@pytest.fixture
def divided(brain):
    """10 bytes, of which tenant A has 4 and tenant B 3; the rest share 3."""
    brain.manager.set_quotas(Tier.CPU, {A: 4, B: 3})
    return brain


def test_a_tenant_holds_no_more_than_its_quota_and_evicts_only_its_own(divided):
    fill(divided, "", 3)
    fill(divided, B, 3)
    fill(divided, A, 9)
    assert books(divided) == {A: (4, 4), B: (3, 3)}
    assert divided.manager.stats(0)["locations"][0]["bytes"] == 10
    for _ in range(5):
        divided.serve("zz")
    assert books(divided) == {A: (4, 4), B: (3, 3)}


def test_those_without_a_quota_share_what_is_left(divided):
    fill(divided, "", 9)
    fill(divided, tenant_tag(SECRET, "c"), 9)
    assert divided.manager.stats(0)["locations"][0]["bytes"] == 3


def test_a_tenant_whose_quota_is_zero_stores_nothing(brain):
    brain.manager.set_quotas(Tier.CPU, {A: 0})
    brain.serve("abcd", tenant=A)
    assert brain.stored("abcd") == 0
    assert brain.counters()["refused_colder"] == 1


def test_a_child_belongs_to_the_tenant_of_its_parent(divided):
    divided.serve("ab", tenant=A)
    divided.serve("abcd", tenant=B)
    assert books(divided) == {A: (2, 4), B: (0, 3)}


def test_quotas_given_later_move_what_is_stored_to_its_tenant(brain):
    fill(brain, A, 3)
    fill(brain, "", 3)
    plan = brain.plan(f"0{A[:1]}")
    brain.manager.set_quotas(Tier.CPU, {A: 4})
    assert books(brain) == {A: (3, 4)}
    assert brain.evicted() == []
    brain.manager.release(plan.lease_id)
    fill(brain, A, 9)
    assert books(brain) == {A: (4, 4)}
    brain.manager.set_quotas(Tier.CPU, {})
    assert books(brain) == {}
    fill(brain, A, 9)
    assert brain.manager.stats(0)["locations"][0]["bytes"] == 10


def test_what_exceeds_a_new_quota_is_evicted_coldest_first(brain):
    brain.serve("abcdef", tenant=A)
    fill(brain, A, 3)
    brain.serve("abcdef", tenant=A)
    brain.manager.set_quotas(Tier.CPU, {A: 2})
    assert len(brain.evicted()) == 4
    assert books(brain) == {A: (2, 2)}
    assert brain.stored("abcdef") == 4
    assert brain.counters()["trimmed_segments"] == 4
    assert brain.evicted() == []


def test_what_exceeds_what_is_left_to_the_rest_is_evicted_too(brain):
    fill(brain, "", 10)
    brain.manager.set_quotas(Tier.CPU, {A: 6})
    fill(brain, A, 1)
    assert brain.manager.stats(0)["locations"][0]["bytes"] == 5
    assert books(brain) == {A: (1, 6)}


def test_a_location_filled_by_a_partition_that_was_cut_down_grants_no_room_it_has_not(brain):
    brain.serve("abcdefghijklmnopqrst")
    plan = brain.plan("abcdefghijklmnopqrst")
    brain.manager.set_quotas(Tier.CPU, {A: 6})
    assert brain.evicted() == []
    assert brain.offer("uv", tenant=A).keys == ()
    brain.manager.release(plan.lease_id)
    assert len(brain.evicted()) == 6
    assert brain.offer("uv", tenant=A).keys == brain.keys("uv")


def test_a_large_cut_is_carried_out_in_slices(brain, monkeypatch):
    monkeypatch.setattr(quotas, "MOST_TRIMMED", 3)
    fill(brain, "", 10)
    brain.manager.set_quotas(Tier.CPU, {A: 9})
    assert [len(brain.evicted()) for _ in range(4)] == [3, 3, 3, 0]


def test_pinned_segments_stay_beyond_a_new_quota(brain_with):
    brain = brain_with(pin_budget_bytes=10)
    brain.serve("abcd", tenant=A)
    brain.pin("abcd")
    brain.manager.set_quotas(Tier.CPU, {A: 1})
    assert brain.evicted() == []
    brain.manager.unpin(0, brain.keys("abcd")[-1:])
    assert brain.evicted() == [brain.keys("abcd")[1]]


def test_quotas_hold_at_a_location_that_comes_later(divided):
    divided.manager.set_budget(OTHER_NODE, 20)
    for number in range(9):
        divided.serve(f"x{number}", location=OTHER_NODE, tenant=A)
    assert books(divided, 1) == {A: (4, 4), B: (0, 3)}


def test_a_location_too_small_for_all_quotas_shares_out_in_proportion(brain):
    brain.manager.set_quotas(Tier.CPU, {A: 6, B: 4})
    brain.manager.set_budget(OTHER_NODE, 5)
    found = brain.manager.stats(0)["locations"][1]["tenants"]
    assert [found[tenant]["budget_bytes"] for tenant in (A, B)] == [3, 2]
    assert brain.offer("uv", location=OTHER_NODE).keys == ()


def test_quotas_of_redis_and_of_cpu_tiers_are_their_own(tiered):
    tiered.manager.set_quotas(Tier.REDIS, {A: 1})
    tiered.serve("abcdef", tenant=A)
    assert tiered.demote_all() == list(tiered.keys("ab"))
    assert (tiered.stored("abcdef"), tiered.kept("abcdef")) == (6, 2)


def test_each_partition_has_a_high_water_mark_of_its_own(brain_with):
    brain = brain_with(redis=20, redis_min_uses=100, cpu_high_water=0.5)
    brain.manager.set_quotas(Tier.CPU, {A: 4})
    fill(brain, A, 4)
    copied = brain.demote_all()
    assert set(copied) == {*brain.keys(f"0{A[:1]}"), *brain.keys(f"1{A[:1]}")}
    assert {key for order in brain.manager.relieve(0) for key in order.keys} == set(copied)
    assert books(brain) == {A: (2, 4)}


def test_what_leaves_one_partition_does_not_count_for_another(brain_with):
    brain = brain_with(redis=20, redis_min_uses=100, cpu_high_water=0.5)
    brain.manager.set_quotas(Tier.CPU, {A: 4})
    fill(brain, "", 6)
    fill(brain, A, 4)
    under_way = [brain.next_demotion(most_bytes=1) for _ in range(6)]
    assert [demotion is not None for demotion in under_way] == [True] * 5 + [False]


@pytest.mark.parametrize(
    ("tier", "wanted", "message"),
    [
        (Tier.CPU, {A: 7, B: 4}, "tier cpu add up to 11 bytes, more than the budget 10 of node node; lower them or"),
        (
            Tier.REDIS,
            {A: 21},
            "tier redis add up to 21 bytes, more than the budget 20 of Redis; lower them or raise kv.",
        ),
        (Tier.CPU, {A: -1}, "must be 0 bytes or more, got -1"),
        (Tier.CPU, {"": 1}, "a quota needs the tag of a tenant"),
        (Tier.DEVICE, {A: 1}, "a device pool belongs to its replica"),
    ],
)
def test_quotas_that_cannot_hold_are_refused_and_nothing_changes(brain_with, tier, wanted, message):
    brain = brain_with(redis=20)
    brain.manager.set_quotas(Tier.CPU, {A: 2})
    before = brain.manager.stats(0)["locations"]
    with pytest.raises(ValueError, match=message):
        brain.manager.set_quotas(tier, wanted)
    assert brain.manager.stats(0)["locations"] == before


def test_quotas_are_checked_only_against_tiers_that_are_there(brain):
    brain.manager.forget_holder(brain.cpu)
    brain.manager.set_quotas(Tier.CPU, {A: 10**9})
    brain.manager.set_quotas(Tier.REDIS, {A: 10**9})


def test_the_tenant_of_a_segment_survives_a_restart(brain_with):
    heir = brain_with()
    heir.manager.set_quotas(Tier.CPU, {A: 2})
    kept = heir.manager.adopt(0, heir.cpu, heir.spans("abcdef", tenant=A), [1] * 3)
    assert kept == list(heir.keys("abcd"))
    assert books(heir) == {A: (2, 2)}


def test_a_location_that_is_lost_while_it_is_cut_down_leaves_nothing_to_trim(brain):
    fill(brain, "", 10)
    brain.manager.set_quotas(Tier.CPU, {A: 9})
    brain.manager.forget_holder(brain.cpu)
    assert brain.evicted() == []
    brain.manager.set_budget(brain.cpu, 10)
    fill(brain, A, 10)
    assert books(brain) == {A: (9, 9)}
