"""What a tenant orders and learns concerns its own share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.eviction.pins import PinBudgetError, UnknownKeyError
from kvmanager.index.locations import Tier
from kvmanager.segments.keys import tenant_tag
from kvmanager.segments.server_secret import ServerSecret

SECRET = ServerSecret(bytes(32))
A, B, C = (tenant_tag(SECRET, name) for name in "abc")


def share(brain, tenant):
    tiers = brain.manager.tenant_stats(brain.now, tenant)["tiers"]
    return {tier: (found["segments"], found["bytes"]) for tier, found in tiers.items()}


def pin(brain, text, tenant):
    return brain.manager.pin(brain.now, brain.keys(text)[-1:], 60.0, tenant)


def test_a_tenants_clear_takes_its_own_segments_from_every_shared_tier_and_nobody_elses(tiered):
    tiered.serve("abcd", tenant=A)
    tiered.serve("wxyz", tenant=B)
    tiered.serve("1234")
    tiered.demote_all()
    ordered = tiered.manager.clear({Tier.CPU, Tier.REDIS}, A)
    assert {order.keys for order in ordered} == {tiered.keys("abcd")[::-1]}
    assert {order.source.tier for order in ordered} == {Tier.CPU, Tier.REDIS}
    assert [(tiered.stored(text), tiered.kept(text)) for text in ("abcd", "wxyz", "1234")] == [(0, 0), (4, 4), (4, 4)]


def test_a_clear_without_a_tenant_takes_all(tiered):
    tiered.serve("abcd", tenant=A)
    tiered.serve("wxyz")
    tiered.manager.clear({Tier.CPU})
    assert (tiered.stored("abcd"), tiered.stored("wxyz")) == (0, 0)


def test_what_a_tenant_cleared_is_not_offloaded_again_and_what_others_have_still_is(brain):
    for text, tenant in (("abcd", A), ("wxyz", B)):
        brain.serve(text, tenant=tenant)
        brain.manager.device_stored("replica", brain.hashes(text))
    brain.manager.offloads.leave_out_present(A)
    brain.manager.clear({Tier.CPU})
    named = []
    for _ in range(3):
        named += brain.manager.offloads.candidates("replica", 8, brain.cpu)
    assert {span.tenant for span in named} == {B}


def test_a_tenants_statistics_are_its_own_with_a_quota_or_without(tiered):
    tiered.manager.set_quotas(Tier.CPU, {A: 6})
    tiered.serve("abcd", tenant=A)
    tiered.serve("ab12", tenant=A)
    tiered.serve("wx", tenant=B)
    assert (share(tiered, A), share(tiered, B), share(tiered, C)) == (
        {"cpu": (3, 3), "redis": (0, 0)}, {"cpu": (1, 1), "redis": (0, 0)}, {"cpu": (0, 0), "redis": (0, 0)},
    )  # fmt: skip
    stats = tiered.manager.tenant_stats(0, A)
    assert stats["tiers"]["cpu"]["quota_bytes"] == 6
    assert tiered.manager.tenant_stats(0, B)["tiers"]["cpu"]["quota_bytes"] is None
    assert set(stats) == {"tiers", "pins", "pinned_bytes", "pin_budget_bytes"}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["serve", "clear", "lose", "demote"]), st.sampled_from([A, B, ""]), st.integers(0, 5)
        ),
        max_size=40,
    )
)
def test_the_shares_of_all_tenants_add_up_to_what_each_place_holds(brain_with, steps):
    brain = brain_with(budget=6, redis=9)
    for step, tenant, number in steps:
        if step == "serve":
            brain.serve(f"{number}{tenant[:1]}xy", tenant=tenant)
        elif step == "clear":
            brain.manager.clear({Tier.CPU, Tier.REDIS}, tenant)
        elif step == "demote":
            brain.demote_all()
        else:
            brain.manager.forget_holder(brain.redis)
            brain.manager.set_budget(brain.redis, 9)
        brain.manager.expire(brain.now)
        held = {"cpu": [0, 0], "redis": [0, 0]}
        for of in (A, B, ""):
            for tier, (segments, nbytes) in share(brain, of).items():
                held[tier][0] += segments
                held[tier][1] += nbytes
        for place in brain.manager.stats(brain.now)["locations"]:
            assert held[place["tier"]] == [place["segments"], place["bytes"]]


@pytest.fixture
def shared_out(brain_with):
    """Tenants A and B may pin 2 bytes each."""
    brain = brain_with(pin_budget_bytes=4, tenant_pin_bytes={A: 2, B: 2})
    for text, tenant in (("abcd", A), ("ab12", A), ("wxyz", B)):
        brain.serve(text, tenant=tenant)
    return brain


def test_a_tenant_that_has_pinned_all_it_may_leaves_the_others_their_part(shared_out):
    pin(shared_out, "abcd", A)
    with pytest.raises(PinBudgetError, match=r"would keep 3 bytes.*budget of 2"):
        pin(shared_out, "ab12", A)
    report = pin(shared_out, "wxyz", B)
    assert (report.pinned_bytes, report.budget_bytes) == (2, 2)
    assert shared_out.manager.tenant_stats(0, A)["pins"] == 1


def test_who_has_no_part_of_the_budget_pins_nothing(shared_out):
    with pytest.raises(PinBudgetError):
        pin(shared_out, "abcd", C)


def test_only_the_owner_ends_a_pin_and_others_are_not_told_of_it(shared_out):
    pin(shared_out, "abcd", A)
    assert shared_out.manager.unpin(0, shared_out.keys("abcd")[-1:], B) == []
    with pytest.raises(UnknownKeyError):
        pin(shared_out, "abcd", B)
    assert shared_out.manager.stats(0)["pinned_bytes"] == 2
    assert shared_out.manager.unpin(0, shared_out.keys("abcd")[-1:], A) == list(shared_out.keys("abcd")[-1:])
    assert shared_out.manager.stats(0)["pinned_bytes"] == 0
    pin(shared_out, "ab12", A)


def test_a_pin_that_ends_by_itself_gives_its_tenant_the_room_back(shared_out):
    pin(shared_out, "abcd", A)
    shared_out.now = 61.0
    shared_out.manager.expire(61.0)
    assert pin(shared_out, "ab12", A).pinned_bytes == 2
