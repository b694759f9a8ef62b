import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvmanager.index.locations import Tier
from kvmanager.loading.load_rates import LinearTime, PrefillTime
from kvmanager.loading.load_split import StoredPart, best_split
from tests.quantities import up_to

PREFILL = PrefillTime(0.005, 1e-3, 1e-7)
MB = 10**6
SEGMENT = 256


def parts(tiers, nbytes=MB):
    return [StoredPart(SEGMENT * (number + 1), tier, nbytes) for number, tier in enumerate(tiers)]


def redis(count):
    return parts([Tier.REDIS] * count)


seconds = up_to(0.1)
times = st.builds(LinearTime, seconds, st.floats(1e5, 1e10))
tiers = st.dictionaries(st.sampled_from([Tier.CPU, Tier.REDIS]), times)
prefills = st.builds(PrefillTime, seconds, st.floats(1e-6, 1e-2), up_to(1e-6, 1e-12))
stored = st.lists(st.tuples(st.sampled_from([Tier.CPU, Tier.REDIS]), st.integers(1, 8), st.integers(1, 10 * MB)))


@settings(max_examples=200)
@given(
    stored,
    st.integers(0, 40),
    st.integers(0, 400),
    prefills,
    tiers,
    up_to(1e7),
    up_to(2.0),
    up_to(3.0),
)
def test_the_split_is_the_best_of_all(chain, device, tail, prefill, known, ahead, queue_s, most_s):
    end, listed = 0, []
    for tier, blocks, nbytes in chain:
        end += 32 * blocks
        listed.append(StoredPart(end, tier, nbytes))
    prompt_tokens, device_tokens = end + tail + 1, 32 * device

    def expected(count):
        """Written anew, part by part: None for a load that cannot be."""
        loaded = [part for part in listed[:count] if part.end_token > device_tokens]
        if any(part.tier not in known for part in loaded):
            return None
        load_s = 0.0
        for tier in {part.tier for part in loaded}:
            nbytes = sum(part.nbytes for part in loaded if part.tier is tier)
            load_s += known[tier].latency_s + (nbytes + ahead) / known[tier].per_s
        if loaded and load_s > most_s:
            return None
        covered = min(max([device_tokens, *(part.end_token for part in loaded)]), prompt_tokens - 1)
        return max(queue_s, load_s) + prefill.seconds(prompt_tokens - covered, covered)

    found = best_split(
        listed, prompt_tokens, device_tokens, prefill, known, dict.fromkeys(Tier, ahead), queue_s, most_s
    )
    least = sum(part.end_token <= device_tokens for part in listed)
    choices = {count: total for count in range(least, len(listed) + 1) if (total := expected(count)) is not None}
    assert found.parts in choices
    assert found.seconds == pytest.approx(choices[found.parts])
    assert found.seconds <= min(choices.values()) * (1 + 1e-9) + 1e-12
    assert found.recompute_s == pytest.approx(expected(least))


@settings(max_examples=100)
@given(prefills, seconds, st.lists(st.floats(1e4, 1e10), min_size=2, max_size=2), up_to(1.0), st.integers(1, 20))
def test_a_slower_link_never_loads_more(prefill, latency_s, rates, queue_s, count):
    slow, fast = (
        best_split(redis(count), 6000, 0, prefill, {Tier.REDIS: LinearTime(latency_s, rate)}, queue_s=queue_s).parts
        for rate in sorted(rates)
    )
    assert slow <= fast


@settings(max_examples=100)
@given(prefills, times, st.lists(up_to(5.0), min_size=2, max_size=2), st.integers(1, 20))
def test_a_longer_queue_never_loads_less(prefill, link, queues, count):
    short, long = (
        best_split(redis(count), 6000, 0, prefill, {Tier.REDIS: link}, queue_s=queue_s).parts
        for queue_s in sorted(queues)
    )
    assert short <= long


def test_below_the_break_even_nothing_is_loaded_and_above_it_everything():
    link = {Tier.REDIS: LinearTime(0.5, 1e9)}
    assert best_split(redis(1), 257, 0, PREFILL, link).parts == 0
    assert best_split(redis(4), 1025, 0, PREFILL, link).parts == 4


def test_one_block_is_not_loaded_when_the_latency_alone_is_above_its_prefill():
    block = [StoredPart(32, Tier.CPU, 1)]
    assert best_split(block, 33, 0, PREFILL, {Tier.CPU: LinearTime(0.04, 1e12)}).parts == 0
    assert best_split(block, 33, 0, PREFILL, {Tier.CPU: LinearTime(0.03, 1e12)}).parts == 1


def test_the_near_tier_is_loaded_and_the_slow_one_behind_it_computed():
    chain = parts([Tier.CPU] * 3 + [Tier.REDIS] * 3)
    times = {Tier.CPU: LinearTime(0.001, 1e9), Tier.REDIS: LinearTime(0.0, 1e6)}
    assert best_split(chain, 2000, 0, PREFILL, times).parts == 3


def test_what_others_load_from_a_tier_makes_it_dearer():
    times = {Tier.REDIS: LinearTime(0.0, 1e7)}  # a segment: 0.1 s, of 0.26 to compute it
    assert best_split(redis(4), 1025, 0, PREFILL, times).parts == 4
    assert best_split(redis(4), 1025, 0, PREFILL, times, {Tier.REDIS: 10 * MB}).parts == 0


def test_what_hides_behind_the_queue_is_loaded_whatever_it_takes():
    times = {Tier.REDIS: LinearTime(0.0, 1e6)}  # a segment: 1 s
    assert best_split(redis(4), 1025, 0, PREFILL, times).parts == 0
    assert best_split(redis(4), 1025, 0, PREFILL, times, queue_s=2.5).parts == 2


def test_a_load_ends_before_its_deadline():
    prefill = PrefillTime(0.0, 0.1)
    times = {Tier.REDIS: LinearTime(0.0, 1e6)}
    assert best_split(redis(4), 1025, 0, prefill, times).parts == 4
    assert best_split(redis(4), 1025, 0, prefill, times, most_load_s=2.0).parts == 2


def test_what_the_device_has_is_neither_loaded_nor_computed():
    times = {Tier.REDIS: LinearTime(0.1, 1e9)}
    split = best_split(redis(4), 1025, 3 * SEGMENT, PREFILL, times)
    assert split.parts == 4
    assert split.seconds == pytest.approx(0.101 + PREFILL.seconds(1, 1024))
    assert best_split(redis(4), 1025, 4 * SEGMENT, PREFILL, times).parts == 4
    assert best_split(redis(4), 1025, 4 * SEGMENT, PREFILL, {}).parts == 4


def test_ties_go_to_loading():
    prefill = PrefillTime(0.0, 1.0)
    assert best_split(parts([Tier.CPU], 256), 257, 0, prefill, {Tier.CPU: LinearTime(0.0, 1.0)}).parts == 1


def test_a_token_after_a_long_context_costs_more():
    assert PREFILL.seconds(100, 10_000) > PREFILL.seconds(100)
    whole = PREFILL.seconds(300)
    assert whole == pytest.approx(PREFILL.seconds(100) + PREFILL.seconds(200, 100) - PREFILL.fixed_s)
