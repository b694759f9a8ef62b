"""What plans load, by rates as they are measured, on simulated links and with a clock of the test's own."""

import pytest
from measured_server import (
    CPU,
    DEADLINE_S,
    FAST,
    IN_REDIS,
    SEGMENT_BLOCKS,
    SEGMENT_BYTES,
    SEGMENT_TOKENS,
    SLOW,
    Server,
    stored,
)

from kvmanager.config import ManagerConfig
from kvmanager.index.locations import REDIS, Tier
from kvmanager.loading.load_choice import MOST_UNMEASURED, PREFILL_PROBE, LoadMode
from kvmanager.loading.probes import PROBE_AGE_S, PROBE_PLANS, PROBE_SHARE
from kvmanager.moves.plan import PlanQuery, PlanReason


def test_the_default_of_a_manager_is_to_choose():
    assert LoadMode(ManagerConfig(8).load_or_recompute) is LoadMode.AUTO


def test_everything_is_loaded_where_that_is_faster():
    server = Server().warm_up()
    assert server.plan(IN_REDIS)[:2] == (4, PlanReason.HIT)


def test_nothing_is_loaded_where_computing_is_faster():
    server = Server()
    server.rates[Tier.REDIS] = SLOW
    assert server.warm_up().plan(IN_REDIS)[:2] == (0, PlanReason.RECOMPUTE_FASTER)


def test_of_a_near_and_a_slow_tier_the_near_part_is_loaded():
    server = Server()
    server.rates[Tier.REDIS] = SLOW
    assert server.warm_up().plan(stored([CPU, CPU, REDIS]))[:2] == (2, PlanReason.PARTIAL)


@pytest.mark.parametrize(
    ("mode", "expected"), [(LoadMode.LOAD, (4, PlanReason.HIT)), (LoadMode.RECOMPUTE, (0, PlanReason.RECOMPUTE_ALWAYS))]
)
@pytest.mark.parametrize("rate", [FAST, SLOW])
def test_the_setting_overrules_what_is_measured(mode, expected, rate):
    server = Server(mode)
    server.rates[Tier.REDIS] = rate
    assert server.warm_up().plan(IN_REDIS)[:2] == expected


def test_what_the_device_has_is_no_load_and_stays_planned_lest_it_leaves():
    server = Server().warm_up()
    assert server.plan(IN_REDIS, device=4 * SEGMENT_BLOCKS)[:2] == (4, PlanReason.DEVICE)
    assert server.choice.describe()["plans"] == {"device": 1}


def test_a_slow_link_pays_for_what_hides_behind_the_queue():
    server = Server()
    server.rates[Tier.REDIS] = SLOW
    server.warm_up()
    assert server.plan(IN_REDIS, queued=3000)[:2] == (1, PlanReason.PARTIAL)  # 1.17 s of queue


def test_a_device_that_may_lack_windows_counts_for_nothing():
    """Blocks up to the last segment are there, and that one is not worth its latency: without windows all is lost."""
    server = Server()
    server.latency_s = 0.2
    server.warm_up()
    device = 3 * SEGMENT_BLOCKS
    assert server.plan(stored([CPU] * 4), device)[:2] == (0, PlanReason.RECOMPUTE_FASTER)
    assert server.plan(stored([CPU] * 4), device, needs_landing=True)[:2] == (4, PlanReason.HIT)
    in_both = Server().warm_up().plan(stored([REDIS] * 3 + [CPU]), device, needs_landing=True)
    assert in_both[:2] == (4, PlanReason.HIT)


def test_a_burst_does_not_wait_for_one_link():
    server = Server()
    server.rates[Tier.REDIS] = 2e7  # 0.2 s for what takes 0.4 s to compute
    server.warm_up()
    counts = [server.plan(IN_REDIS)[0] for _ in range(10)]
    assert 0 < sum(count == 4 for count in counts) <= 3
    for lease in range(1, 11):
        server.choice.ended(lease)
    assert server.plan(IN_REDIS)[0] == 4


def test_a_burst_for_one_prompt_is_one_load():
    server = Server()
    server.rates[Tier.REDIS] = 4e7  # 0.1 s for what takes 0.4 s to compute
    server.warm_up()
    assert [server.plan(IN_REDIS, again=True)[:2] for _ in range(10)] == [(4, PlanReason.HIT)] * 10
    assert server.plan(IN_REDIS)[0] == 4, "another prompt's is the second"


def deadline_s(server, segments):
    choice = server.choice.for_prompt(server.now, "replica", 0, PlanQuery([b""] * 100, prompt_tokens=100 * 32 + 20))
    choice.choose(segments)
    return choice.deadline_s


def test_a_loads_time_grows_with_its_bytes_and_with_those_ahead_of_it():
    server = Server()
    server.rates[Tier.REDIS] = 1e8
    server.tokens_per_s = 100.0
    server.warm_up()
    small, large = (deadline_s(server, stored([REDIS] * 4, nbytes)) for nbytes in (10**6, 10**8))
    assert small == pytest.approx(DEADLINE_S + 3 * (0.002 + 0.04), rel=0.05)
    assert large == pytest.approx(DEADLINE_S + 3 * (0.002 + 4.0), rel=0.05), "not cut off after the base"
    server.plan(stored([REDIS] * 4, 10**8))
    assert deadline_s(server, stored([REDIS] * 4, 10**6)) > DEADLINE_S + 3 * 4.0


def test_a_probe_is_not_worth_more_than_the_base():
    server = Server()
    server.rates[Tier.REDIS] = SLOW
    server.warm_up()
    found = set()
    for _ in range(10 * PROBE_PLANS):
        server.now += PROBE_AGE_S
        choice = server.choice.for_prompt(server.now, "replica", 0, PlanQuery([b""] * 32, prompt_tokens=32 * 32 + 20))
        if choice.choose(IN_REDIS)[1] is PlanReason.PROBE:
            found.add(choice.deadline_s)
    assert found == {DEADLINE_S}


def test_a_load_whose_end_nobody_told_is_forgotten():
    server = Server()
    server.rates[Tier.REDIS] = 2e7
    server.warm_up()
    while server.plan(IN_REDIS)[0]:
        pass
    server.now += 10 * DEADLINE_S
    assert server.plan(IN_REDIS)[0] == 4


def test_contention_is_not_taken_for_a_slow_link():
    server = Server()
    server.rates[Tier.REDIS] = 4e7
    server.warm_up(tiers=[])
    for _ in range(6):
        leases = [server.plan(IN_REDIS)[2] for _ in range(3)]
        for place, lease in enumerate(leases, start=1):  # one after the other over the link
            server.now += 0.1
            sample = ("load", "redis", 4 * SEGMENT_TOKENS, 4 * SEGMENT_BYTES, 0.002 + place * 0.1)
            server.choice.report(server.now, "replica", [sample])
            server.choice.ended(lease)
    assert server.choice.describe()["tiers"]["redis"]["bytes_per_s"] == pytest.approx(4e7, rel=0.1)


# What is not known.


def test_an_unknown_tier_is_loaded_from_by_a_few_at_a_time():
    server = Server().warm_up(tiers=[Tier.CPU])
    reasons = [server.plan(IN_REDIS)[1] for _ in range(MOST_UNMEASURED + 3)]
    assert reasons == [PlanReason.HIT] * MOST_UNMEASURED + [PlanReason.UNMEASURED] * 3


def test_where_everything_is_loaded_computing_is_measured_now_and_then():
    server = Server()
    assert {server.plan(IN_REDIS)[:2] for _ in range(2 * PREFILL_PROBE)} == {(4, PlanReason.HIT)}
    for _ in range(8):
        server.choice.report(0.0, "replica", [("load", "redis", SEGMENT_TOKENS, SEGMENT_BYTES, 0.01)])
    plans = [server.plan(IN_REDIS)[:2] for _ in range(2 * PREFILL_PROBE)]
    assert plans.count((0, PlanReason.PROBE)) == 2
    assert plans.count((4, PlanReason.HIT)) == 2 * PREFILL_PROBE - 2


def test_a_link_that_brings_nothing_is_left_after_one_load():
    server = Server().warm_up(tiers=[Tier.CPU])
    server.rates[Tier.REDIS] = 1e3
    counts = [server.serve(IN_REDIS)[1] for _ in range(20)]
    assert counts[0] == 4
    assert not any(counts[1:])


@pytest.mark.parametrize("slower", [10, 100, 10_000])
def test_a_link_that_becomes_slow_costs_very_few_loads(slower):
    server = Server(noise=0.15).warm_up()
    for _ in range(20):
        server.serve(IN_REDIS)
    server.rates[Tier.REDIS] = 4e7 / slower  # a load takes a tenth of the computing, and then at least as long
    loads = sum(server.serve(IN_REDIS)[2] is PlanReason.HIT for _ in range(30))
    assert loads <= 3


@pytest.mark.parametrize("rate", [2e6, 1e6, 1e4])
def test_a_link_that_becomes_fast_again_is_noticed(rate):
    server = Server(noise=0.15)
    server.rates[Tier.REDIS] = rate
    server.warm_up()
    for _ in range(30):
        server.serve(IN_REDIS)
    server.rates[Tier.REDIS] = FAST
    slow = server.now
    reasons = []
    while PlanReason.HIT not in reasons:
        reasons.append(server.serve(IN_REDIS)[2])
        assert len(reasons) < 2 * PROBE_AGE_S / 0.4
    assert server.now - slow < PROBE_AGE_S + PROBE_PLANS
    assert all(server.serve(IN_REDIS)[2] is PlanReason.HIT for _ in range(10))


def test_a_tier_that_comes_back_after_it_brought_nothing_is_loaded_from_at_once():
    server = Server().warm_up()
    server.rates[Tier.REDIS] = 1e3
    assert [server.serve(IN_REDIS)[1] for _ in range(3)] == [4, 0, 0]
    server.rates[Tier.REDIS] = FAST
    server.choice.tier_is_back(Tier.REDIS)
    assert [server.serve(IN_REDIS)[1] for _ in range(10)] == [4] * 10


def test_what_was_measured_of_a_tier_outlives_its_restart():
    server = Server()
    server.rates[Tier.REDIS] = SLOW
    server.warm_up().choice.tier_is_back(Tier.REDIS)
    assert server.plan(IN_REDIS)[1] is PlanReason.RECOMPUTE_FASTER


def test_probes_of_a_slow_link_cost_little_and_load_one_segment():
    server = Server()
    server.rates[Tier.REDIS] = 3e6
    server.warm_up()
    served = [server.serve(IN_REDIS) for _ in range(300)]
    probes = [(count, reason) for _, count, reason in served if reason is PlanReason.PROBE]
    assert {count for count, _ in probes} == {1}
    assert len(probes) >= 3
    total_s, least_s = sum(seconds for seconds, _, _ in served), 300 * server.prefill_s(4 * SEGMENT_TOKENS + 20)
    assert total_s <= (1 + 1.2 * PROBE_SHARE) * least_s


def test_a_hopeless_link_is_probed_by_age_only_when_prompts_come_often_enough():
    server = Server()
    server.rates[Tier.REDIS] = 1e3
    server.warm_up()
    served = []
    for _ in range(3 * PROBE_PLANS):
        server.now += 2 * PROBE_AGE_S  # hardly anybody asks
        served.append(server.serve(IN_REDIS)[2])
    assert served.count(PlanReason.PROBE) <= 3


def test_a_replica_that_computes_faster_than_was_measured_stops_loading():
    server = Server()
    server.rates[Tier.REDIS] = 1.1e7  # four segments in 0.36 s, against 0.41 s
    server.warm_up()
    server.rest_tells = False
    assert server.serve(IN_REDIS)[2] is PlanReason.HIT
    server.tokens_per_s *= 1.5
    served = [server.serve(IN_REDIS)[2] for _ in range(10 * PROBE_PLANS)]
    assert PlanReason.PROBE in served
    assert set(served[5 * PROBE_PLANS :]) <= {PlanReason.RECOMPUTE_FASTER, PlanReason.PROBE}


def test_probes_of_computing_cost_little():
    server = Server()
    server.rates[Tier.REDIS] = 1.5e7
    server.warm_up()
    server.rest_tells = False
    served = [server.serve(IN_REDIS) for _ in range(300)]
    assert [reason for _, _, reason in served].count(PlanReason.PROBE) >= 3
    assert {count for _, count, reason in served if reason is PlanReason.PROBE} == {0}
    loaded_s = server.load_s(IN_REDIS) + server.prefill_s(20)
    assert sum(seconds for seconds, _, _ in served) <= (1 + 1.2 * PROBE_SHARE) * 300 * loaded_s


def test_nothing_is_computed_to_measure_it_where_loading_is_far_better():
    server = Server().warm_up()
    server.rest_tells = False
    assert {server.serve(IN_REDIS)[2] for _ in range(2000)} == {PlanReason.HIT}


def test_nothing_is_computed_to_measure_it_because_the_queue_is_long():
    server = Server().warm_up()
    reasons = set()
    for _ in range(10 * PREFILL_PROBE):
        _, reason, lease = server.plan(IN_REDIS, queued=20_000)  # 8 s, and 0.4 s of computing saved
        server.choice.ended(lease)
        reasons.add(reason)
    assert reasons == {PlanReason.HIT}


def test_a_long_queue_does_not_pay_for_probes_of_a_slow_link():
    server = Server()
    server.rates[Tier.REDIS] = 1e5  # never within the deadline
    server.warm_up()
    reasons = [server.plan(IN_REDIS, queued=1000)[1] for _ in range(60)]
    assert set(reasons) == {PlanReason.RECOMPUTE_FASTER}


# The envelope.


def test_the_time_to_the_first_token_follows_the_better_of_both_while_the_link_is_throttled():
    arms = {mode: Server(mode, noise=0.1) for mode in LoadMode}
    for rate in (4e9, 1e9, 3e8, 1e8, 3e7, 1e7, 3e6, 1e6, 1e7, 1e9):
        means = {}
        for mode, server in arms.items():
            server.rates[Tier.REDIS] = rate
            if rate == 4e9:
                server.warm_up()
            served = [server.serve(IN_REDIS)[0] for _ in range(70)]
            means[mode] = sum(served[30:]) / 40
        assert means[LoadMode.AUTO] <= 1.10 * min(means.values()), f"at {rate:g} bytes/s"


# What the router and short prompts learn from it.


def test_a_tier_that_is_not_worth_a_load_has_no_credit():
    server = Server()
    server.rates[Tier.REDIS] = SLOW
    credits = server.warm_up().choice.credits(server.now)["replica"]
    assert credits["redis"] == 0.0
    assert credits["cpu"] > 0.9


def test_where_nothing_is_loaded_no_shared_tier_has_a_credit():
    assert Server(LoadMode.RECOMPUTE).choice.credits(0.0) == {"": {"cpu": 0.0, "redis": 0.0}}


def test_prompts_below_the_measured_break_even_need_no_plan():
    server = Server()
    server.latency_s = 0.05  # as long as 128 tokens take to compute
    assert server.warm_up().choice.short_tokens("replica") == pytest.approx(128, abs=8)
    assert server.choice.short_tokens("another of the kind") == pytest.approx(128, abs=8)


def test_without_measurements_or_with_a_fixed_setting_every_prompt_is_planned():
    assert Server().choice.short_tokens("replica") == 0
    server = Server(LoadMode.LOAD)
    server.latency_s = 0.05
    assert server.warm_up().choice.short_tokens("replica") == 1, "all is worth a load, and that is known"


def test_where_nothing_pays_short_prompts_are_those_of_a_segment_at_most():
    server = Server()
    server.rates[Tier.CPU] = server.rates[Tier.REDIS] = 1e3
    assert server.warm_up().choice.short_tokens("replica") == SEGMENT_TOKENS


@pytest.mark.parametrize("started_late", [False, True])
def test_a_coded_segment_is_judged_by_its_bytes_at_the_tier(started_late):
    server = Server().warm_up(tiers=[Tier.CPU])
    coded = [segment._replace(nbytes=SEGMENT_BYTES // 8) for segment in IN_REDIS]
    for _ in range(6):
        lease = server.plan(coded)[2]
        server.now += 10 * DEADLINE_S if started_late else 0.1  # the engine was in a long step, and the plan forgotten
        server.plan([coded[0]._replace(tier=CPU.tier, holder=CPU.holder)])
        sample = ("load", "redis", 4 * SEGMENT_TOKENS, 4 * SEGMENT_BYTES // 8, 0.25)
        server.choice.report(server.now, "replica", [sample])
        server.choice.ended(lease)
    assert server.choice.describe()["tiers"]["redis"]["bytes_per_s"] == pytest.approx(2e6, rel=0.3)
    assert server.plan(coded)[0] == 4
    assert server.plan(IN_REDIS)[0] == 0, "of these, eight times as much has to come"


def test_what_is_known_is_described():
    server = Server().warm_up()
    server.plan(IN_REDIS)
    found = server.choice.describe()
    assert found["mode"] == "auto"
    assert found["prefill_s"]["per_token"] == pytest.approx(1 / server.tokens_per_s)
    assert found["tiers"]["redis"]["latency_s"] == pytest.approx(0.002)
    assert found["plans"] == {"hit": 1}
