"""Blend or compute: by the formula, by what was measured, and by what earlier blends took."""

from math import inf, nan

import pytest
from measured_server import BLOCK, CPU, DEADLINE_S, SEGMENT_BLOCKS, SEGMENT_BYTES, SLOW, Server

from kvmanager.extensions.blend.blend_choice import (
    CORRECTION_HALF_LIFE_S,
    LEAST_REUSED_TOKENS,
    BlendCorrection,
    BlendedPrompt,
    BlendSpan,
    blend_of,
    blend_s,
    chunk_parts,
    outlook,
)
from kvmanager.extensions.blend.chunks import BLENDS, BlendQuery, BlendTerms, PlannedChunk
from kvmanager.extensions.blend.plans import MeasuredChunks, OwnPart
from kvmanager.index.locations import REDIS, Tier
from kvmanager.loading.load_choice import MOST_UNMEASURED, PREFILL_PROBE, LoadMode
from kvmanager.loading.load_rates import PrefillTime
from kvmanager.moves.plan import PlannedLoad, PlanQuery, PlanReason

TERMS = BlendTerms(check_layer=2, layers=10)
PREFILL = PrefillTime(0.01, 0.001)


def stored_chunk(start, segments=4, location=CPU):
    """A chunk of whole segments, 256 tokens each."""
    return PlannedChunk(
        start,
        tuple(
            PlannedLoad(
                bytes([start % 251, number]) * 16, number * SEGMENT_BLOCKS, SEGMENT_BLOCKS, *location, SEGMENT_BYTES, 1
            )
            for number in range(segments)
        ),
    )


class BlendServer(Server):
    """A server that blends."""

    def __init__(self, *args):
        super().__init__(*args)
        self.chunks = MeasuredChunks(self.choice)


def choice_for(server, prompt_tokens, ratio=0.15, device=0, queued=0, terms=TERMS):
    query = PlanQuery([b""] * (prompt_tokens // BLOCK), (), prompt_tokens, queued)
    return server.choice.for_prompt(server.now, "replica", device, query), BlendQuery((), ratio, terms)


def judge(server, chunks, prompt_tokens=2100, reason=PlanReason.COLD, blocks=0, **more):
    choice, asked = choice_for(server, prompt_tokens, **more)
    found, why, _ = server.chunks.choose(choice, asked, OwnPart(blocks, reason), chunks)
    return len(found), why, choice


TWO = [stored_chunk(10), stored_chunk(1034)]


def test_where_a_blend_is_little_sooner_than_computing_that_is_measured_now_and_then():
    server = BlendServer().warm_up()
    near, far = BlendTerms(check_layer=7, layers=10), TERMS
    reasons = [judge(server, TWO, terms=near)[1] for _ in range(60)]
    assert reasons.count(BLENDS) > 40
    assert reasons.count(PlanReason.PROBE) >= 2
    assert {judge(server, TWO, terms=far)[1] for _ in range(60)} == {BLENDS}


def test_the_share_of_a_blend_is_the_layers_before_and_what_is_kept_after():
    assert BlendSpan(0, 1000, 1000, 0.0, TERMS).share == pytest.approx(0.2)
    assert BlendSpan(0, 1000, 1000, 1.0, TERMS).share == pytest.approx(1.0)
    assert BlendSpan(0, 1000, 800, 0.25, TERMS).share == pytest.approx(0.2 + 0.8 * (0.2 + 0.2))
    assert BlendSpan(0, 1000, 800, 0.25, BlendTerms(99, 0)).share == 1.0, "terms that cannot be are no blend"


def test_a_blend_ends_with_a_block_and_before_the_last_token():
    assert blend_of([(10, 64)], range(500), 32, 0.1, TERMS)[:3] == (0, 64, 54)
    assert blend_of([(10, 64), (100, 96)], range(40, 196), 32, 0.1, TERMS)[:3] == (40, 192, 34 + 92)
    assert blend_of([(0, 96)], range(96), 32, 0.1, TERMS)[:3] == (0, 64, 64)
    assert blend_of([(0, 96)], range(128, 200), 32, 0.1, TERMS)[:3] == (128, 128, 0)


def test_the_chunks_load_hides_behind_the_layers_before_the_check_layer():
    blend = BlendSpan(0, 1000, 1000, 0.0, TERMS)
    assert blend_s(blend, PREFILL, 0.0) == blend_s(blend, PREFILL, 0.2) == pytest.approx(0.21)
    assert blend_s(blend, PREFILL, 0.5) == pytest.approx(0.51)


def test_only_layers_from_the_check_layer_on_are_read_of_a_cpu_tier_and_all_of_redis():
    parts = chunk_parts([stored_chunk(0, 1), stored_chunk(300, 1, REDIS)], TERMS)
    assert [(part.tier, part.nbytes) for part in parts] == [(Tier.CPU, 800_000), (Tier.REDIS, SEGMENT_BYTES)]


def prompt(without_s):
    return BlendedPrompt(0.0, "replica", 1000, {}, without_s, queue_s=2.0)


def test_a_blend_begins_when_the_rest_would_and_computes_what_is_behind_it():
    seen = outlook(BlendSpan(100, 900, 800, 0.0, TERMS), prompt(0.0), PREFILL, 0.3)
    assert seen.without_s == pytest.approx(2.0 + 0.01 + 0.9)
    assert seen.with_s == pytest.approx(2.0 + 0.3 + 0.01 + 0.1)
    late = outlook(BlendSpan(100, 900, 800, 0.0, TERMS), prompt(5.91), PREFILL, 0.3)
    assert late.with_s == pytest.approx(5.0 + 0.3 + 0.01 + 0.1), "a load of its own chain comes first"


def test_chunks_are_blended_where_that_is_sooner():
    count, reason, choice = judge(BlendServer().warm_up(), TWO)
    assert (count, reason) == (2, BLENDS)
    assert 0 < choice.reads_s < choice.load_s < choice.recompute_s


def test_nothing_is_blended_where_that_is_later():
    server = BlendServer().warm_up()
    assert judge(server, TWO, ratio=1.0)[:2] == (0, PlanReason.RECOMPUTE_FASTER)
    server.rates[Tier.REDIS] = SLOW
    slow = [stored_chunk(10, location=REDIS), stored_chunk(1034, location=REDIS)]
    assert judge(BlendServer().warm_up(), slow)[:2] == (2, BLENDS)
    server = BlendServer()
    server.rates[Tier.REDIS] = SLOW
    assert judge(server.warm_up(), slow)[:2] == (0, PlanReason.RECOMPUTE_FASTER)


def test_a_blend_that_is_not_worth_it_leaves_the_reason_of_what_is_loaded():
    assert judge(BlendServer().warm_up(), TWO, ratio=1.0, reason=PlanReason.HIT, blocks=8)[1] is PlanReason.HIT


def test_few_reused_tokens_are_not_worth_a_blend():
    server = BlendServer().warm_up()
    blocks = LEAST_REUSED_TOKENS // BLOCK
    just = [PlannedChunk(0, (stored_chunk(0, 1).loads[0]._replace(num_blocks=blocks),))]
    few = [PlannedChunk(0, (stored_chunk(0, 1).loads[0]._replace(num_blocks=blocks - 1),))]
    assert judge(server, just, 2000)[0] == 1
    assert judge(server, few, 2000)[:2] == (0, PlanReason.RECOMPUTE_FASTER)
    assert judge(server, just, 2000, blocks=1)[0] == 0, "a block of them is prefix"


def test_while_nothing_is_measured_chunks_are_blended_and_one_in_some_is_computed():
    server = BlendServer()
    reasons = [judge(server, TWO)[1] for _ in range(2 * PREFILL_PROBE)]
    assert reasons.count(PlanReason.PROBE) == 2
    assert reasons.count(BLENDS) == 2 * PREFILL_PROBE - 2
    assert judge(BlendServer(), TWO)[2].reads_s == 0.0


def test_no_more_than_a_few_blends_wait_for_a_tier_that_nobody_knows():
    server = BlendServer().warm_up([Tier.CPU])
    unknown = [stored_chunk(10, location=REDIS), stored_chunk(1034, location=REDIS)]
    for lease in range(1, MOST_UNMEASURED + 1):
        _, reason, choice = judge(server, unknown)
        assert reason is BLENDS
        server.choice.planned(choice, lease, reason)
    assert judge(server, unknown)[:2] == (0, PlanReason.UNMEASURED)
    server.choice.ended(1)
    assert judge(server, unknown)[1] is BLENDS


def test_the_setting_overrules_what_is_measured():
    few = [stored_chunk(10, 1)]
    assert judge(BlendServer(LoadMode.LOAD).warm_up(), few, 400, ratio=1.0)[:2] == (1, BLENDS)
    assert judge(BlendServer(LoadMode.RECOMPUTE).warm_up(), TWO)[:2] == (0, PlanReason.RECOMPUTE_ALWAYS)


def test_a_plan_that_probes_blends_nothing():
    assert judge(BlendServer().warm_up(), TWO, reason=PlanReason.PROBE)[:2] == (0, PlanReason.PROBE)


def test_chunks_that_the_device_has_as_prefix_are_left_out():
    server = BlendServer().warm_up()
    assert judge(server, TWO, device=1100 // BLOCK)[0] == 1
    assert judge(server, TWO, device=2080 // BLOCK)[:2] == (0, PlanReason.COLD)


def test_the_deadline_and_the_bytes_under_way_cover_the_chunks():
    server = BlendServer()
    server.rates[Tier.CPU] = 1e7  # 0.1 s for each segment
    server.warm_up()
    _, reason, choice = judge(server, TWO, ratio=0.0)
    assert reason is BLENDS
    assert choice.deadline_s > DEADLINE_S + 8 * SEGMENT_BYTES / 1e7
    server.choice.planned(choice, 1, reason)
    assert judge(server, TWO, ratio=0.0)[2].ahead[Tier.CPU] == 8 * SEGMENT_BYTES
    server.choice.ended(1)
    assert judge(server, TWO, ratio=0.0)[2].ahead[Tier.CPU] == 0


def test_blends_that_took_longer_than_expected_are_dearer_for_that_replica_and_forgiven_with_time():
    server = BlendServer().warm_up()
    assert judge(server, TWO)[1] is BLENDS
    server.choice.report(server.now, "other", [("blend", 0.1, 1.6)] * 20)
    assert judge(server, TWO)[1] is BLENDS
    server.choice.report(server.now, "replica", [("blend", 0.1, 1.6)] * 20)
    assert judge(server, TWO)[1] is PlanReason.RECOMPUTE_FASTER
    server.now += 10 * CORRECTION_HALF_LIFE_S
    server.choice.report(server.now, "replica", [("prefill", 1000, server.prefill_s(1000), 0)])
    assert judge(server, TWO)[1] is BLENDS


def test_the_correction_begins_at_one_and_goes_to_what_blends_took():
    correction = BlendCorrection()
    assert correction.factor("a", 0.0) == 1.0
    correction.report("a", 1.0, 2.0, 0.0)
    assert 1.0 < correction.factor("a", 0.0) < 2.0
    for _ in range(40):
        correction.report("a", 1.0, 2.0, 0.0)
    assert correction.factor("a", 0.0) == pytest.approx(2.0, rel=0.01)
    assert correction.factor("a", CORRECTION_HALF_LIFE_S) == pytest.approx(2.0**0.5, rel=0.01)
    assert correction.factor("b", 0.0) == 1.0
    correction.forget_replica("a")
    assert correction.factor("a", 0.0) == 1.0


@pytest.mark.parametrize(
    "sample", [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (nan, 1.0), (1.0, inf), ("1", 1.0), (True, 1.0)]
)
def test_samples_that_cannot_be_are_ignored(sample):
    server = BlendServer().warm_up()
    before = judge(server, TWO)[2].load_s
    server.choice.report(server.now, "replica", [("blend", *sample), ("blend",), ("blend", 1.0)])
    assert judge(server, TWO)[2].load_s == before


def test_one_absurd_sample_does_not_end_blending():
    server = BlendServer().warm_up()
    server.choice.report(server.now, "replica", [("blend", 1e-9, 1e9)])
    assert judge(server, TWO)[1] is BLENDS
