import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.index.locations import Tier
from kvmanager.routing.cost import RoutingState
from kvmanager.routing.mirror import TierHits

REPLICAS = ["0", "1", "2", "3"]
BLOCK = 32


@pytest.fixture
def routing():
    return RoutingState(block_size=BLOCK)


def send(routing, name, hits=None, prompt_tokens=1024, now=0.0):
    """Route one request to the best replica, as the router does; return that replica."""
    chosen = routing.rank(REPLICAS, hits or {}, prompt_tokens, now)[0]
    found = (hits or {}).get(chosen, TierHits(0, 0, 0))
    routing.route(name, chosen, prompt_tokens - sum(found) * BLOCK, prompt_tokens // BLOCK, now)
    return chosen


def test_a_burst_of_equal_cold_prompts_does_not_herd(routing):
    chosen = [send(routing, str(number)) for number in range(40)]
    assert all(chosen.count(replica) == 10 for replica in REPLICAS)


def test_affinity_wins_when_the_hit_is_worth_it(routing):
    routing.route("busy", "2", 500, 16, now=0.0)
    assert send(routing, "hit", {"2": TierHits(30, 0, 0)}) == "2"


def test_affinity_loses_when_the_replica_is_too_busy(routing):
    routing.route("busy", "2", 8000, 16, now=0.0)
    assert send(routing, "hit", {"2": TierHits(30, 0, 0)}) != "2"


def test_a_burst_on_one_hot_prefix_overflows_to_other_replicas(routing):
    hits = {"2": TierHits(16, 0, 0)}
    chosen = [send(routing, str(number), hits) for number in range(20)]
    assert chosen[0] == "2"
    assert set(chosen) == set(REPLICAS)
    assert chosen.count("2") == max(map(chosen.count, REPLICAS))


def test_a_prompt_waits_for_its_prefix_rather_than_have_it_computed_twice(routing):
    routing.route("busy", "2", 2000, 16, now=0.0)
    hits = {"2": TierHits(30, 0, 0)}
    assert routing.wait("2", hits["2"], 1024) > routing.wait("0", None, 1024)
    assert send(routing, "hit", hits) == "2"
    short_sighted = RoutingState(BLOCK, work_weight=1.0)
    short_sighted.route("busy", "2", 2000, 16, now=0.0)
    assert send(short_sighted, "hit", hits) != "2"


def test_a_prompt_does_not_wait_for_what_it_can_load_elsewhere(routing):
    routing.route("busy", "2", 2000, 16, now=0.0)
    hits = dict.fromkeys(REPLICAS, TierHits(0, 30, 0)) | {"2": TierHits(30, 0, 0)}
    assert send(routing, "hit", hits) != "2"


def test_what_a_replica_was_sent_lately_breaks_near_ties_until_it_is_forgotten(routing):
    for number in range(20):
        routing.route(str(number), "3", 1000, 1, now=0.0)
        routing.finished(str(number))
    hits = {"3": TierHits(2, 0, 0)}
    assert routing.rank(["0", "3"], hits, 64, now=1.0) == ["0", "3"]
    assert routing.rank(["0", "3"], hits, 64, now=600.0) == ["3", "0"]


def test_a_prompt_follows_another_of_the_same_beginning_before_it_is_computed():
    routing = RoutingState(BLOCK, blocks_per_segment=2)
    hashes = [bytes([number]) for number in range(30)]
    routing.route("first", "1", 960, 30, now=0.0, hashes=hashes)
    found = TierHits(1, 3, 4)
    assert routing.with_in_flight("0", found, hashes) == found
    assert routing.with_in_flight("1", found, hashes) == TierHits(30, 0, 0)
    assert routing.with_in_flight("1", found, [*hashes[:5], b"other", b"more"]) == TierHits(4, 0, 4)
    hits = {name: routing.with_in_flight(name, TierHits(0, 0, 0), hashes) for name in REPLICAS}
    assert routing.rank(REPLICAS, hits, 960, now=0.0)[0] == "1"
    routing.finished("first")
    assert routing.with_in_flight("1", found, hashes) == found


def test_what_two_prompts_bring_stays_until_both_have_ended():
    routing = RoutingState(BLOCK)
    hashes = [bytes([number]) for number in range(8)]
    routing.route("a", "1", 0, 8, now=0.0, hashes=hashes)
    routing.route("b", "1", 0, 4, now=0.0, hashes=hashes[:4])
    routing.finished("a")
    assert routing.with_in_flight("1", TierHits(0, 0, 0), hashes).device == 4
    routing.forget_replica("1")
    assert routing.with_in_flight("1", TierHits(0, 0, 0), hashes).device == 0
    routing.finished("b")


def test_credits_of_a_replica_come_before_those_of_all(routing):
    hits = dict.fromkeys(REPLICAS, TierHits(0, 8, 8))
    routing.credits_of = {"2": {Tier.REDIS: 0.9}, "3": {Tier.CPU: 0.1}}
    assert routing.rank(REPLICAS, hits, 1024, 0) == ["2", "0", "1", "3"]


def test_a_hit_is_worth_more_the_nearer_it_is(routing):
    hits = {"0": TierHits(0, 0, 8), "1": TierHits(0, 8, 0), "2": TierHits(8, 0, 0)}
    assert routing.rank(REPLICAS, hits, 1024, 0) == ["2", "1", "0", "3"]


def test_measured_credits_replace_the_starting_ones(routing):
    routing.credits[Tier.REDIS] = 0.9
    hits = {"0": TierHits(0, 0, 8), "1": TierHits(0, 8, 0)}
    assert routing.rank(REPLICAS, hits, 1024, 0)[:2] == ["0", "1"]


def test_a_hit_never_makes_work_negative(routing):
    assert routing.wait("0", TierHits(100, 0, 0), 64) == 0


def test_ties_go_to_the_least_recently_used(routing):
    for number, replica in enumerate(["1", "3", "0", "2"]):
        routing.route(str(number), replica, 10, 1, now=0.0)
        routing.finished(str(number))
    assert routing.rank(REPLICAS, {}, 64, 0) == ["1", "3", "0", "2"]


def test_the_first_token_frees_the_prefill_and_the_end_frees_the_rest(routing):
    idle = routing.wait("0", None, 0)
    routing.route("a", "0", 1000, 7, now=0.0)
    assert routing.wait("0", None, 0) == 1007
    routing.first_token("a")
    assert routing.wait("0", None, 0) == 7
    routing.finished("a")
    assert routing.wait("0", None, 0) == idle


def test_a_request_aborted_before_its_first_token_frees_everything(routing):
    routing.route("a", "0", 1000, 7, now=0.0)
    routing.finished("a")
    routing.first_token("a")
    routing.finished("a")
    assert routing.wait("0", None, 0) == 0


def test_a_request_sent_again_counts_only_where_it_is(routing):
    routing.route("a", "0", 1000, 7, now=0.0)
    routing.route("a", "1", 1000, 7, now=0.0)
    assert routing.wait("0", None, 0) == 0
    assert routing.wait("1", None, 0) == 1007


def test_a_replica_that_is_gone_takes_its_requests_with_it(routing):
    routing.route("a", "0", 1000, 7, now=0.0)
    routing.forget_replica("0")
    routing.finished("a")
    assert routing.wait("0", None, 0) == 0


def test_a_request_whose_end_was_never_told_stops_counting(routing):
    send(routing, "lost", now=0.0)
    assert routing.wait("0", None, 0) > 0
    routing.rank(REPLICAS, {}, 64, now=3601.0)
    assert routing.wait("0", None, 0) == 0


events = st.tuples(st.sampled_from(["route", "first", "end"]), st.integers(0, 5), st.integers(0, 3), st.integers(0, 99))


@given(st.lists(events, max_size=40))
def test_load_is_the_sum_of_what_is_in_flight(history):
    routing, flying = RoutingState(BLOCK), {}
    for event, request, replica, size in history:
        if event == "route":
            routing.route(str(request), str(replica), size, size // 2, now=0.0)
            flying[request] = (str(replica), size, size // 2)
        elif event == "first" and request in flying:
            routing.first_token(str(request))
            flying[request] = (flying[request][0], 0, flying[request][2])
        elif event == "end":
            routing.finished(str(request))
            flying.pop(request, None)
    for replica in REPLICAS:
        expected = sum(prefill + decode for where, prefill, decode in flying.values() if where == replica)
        assert routing.wait(replica, None, 0) == expected
