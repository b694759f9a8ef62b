"""A blended prompt's plan: what is asked of its chunks, how it counts as queued, and what its usage says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from deployments.protocol.extensions.blend_request import BlendRequest, PromptChunk
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest
from deployments.replica.extensions.blend import blend_query
from deployments.replica.prompt_plans import LOAD_FAILED, PromptPlans
from kvmanager.extensions.blend.chunks import (
    BLEND,
    BLENDS,
    BlendQuery,
    BlendTerms,
    ChunkQuery,
    PlannedBlend,
    PlannedChunk,
)
from kvmanager.moves.plan import Plan, PlanExpectation, PlannedLoad, PlanQuery, PlanReason

BLOCK = 32
PROMPT = 10 * BLOCK
TERMS = BlendTerms(2, 10)
FIRST, SECOND = PromptChunk(40, 80, [b"a", b"b"]), PromptChunk(120, 100, [b"c", b"d", b"e"])


class Source:
    """Answers with `answer`, and remembers."""

    def __init__(self, answer: Plan | None = None, terms: BlendTerms | None = TERMS) -> None:
        self.answer = answer
        self.terms = {} if terms is None else {BLEND: terms}
        self.blends: list[BlendQuery | None] = []
        self.samples: list[Any] = []

    async def plan(self, query: PlanQuery) -> Plan | None:
        self.blends.append(query.extras.get(BLEND))
        return self.answer

    def report_rate(self, sample: Any) -> None:
        self.samples.append(sample)


def request(*chunks: PromptChunk, ratio: float = 0.25, **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=list(range(PROMPT)),
        sampling_params=SamplingParams(**params),
        cache_salt="salt",
        block_hashes=[b"h"] * 10,
        fidelity="blended",
        extras={BLEND: BlendRequest(list(chunks), "exact", ratio)} if chunks else {},
    )


def planned(own_blocks: int = 0, device_tokens: int = 0, ratio: float = 0.25) -> Plan:
    """A plan that brings blocks of the prompt's own, and blends 2 and 3 blocks of the two chunks."""
    own = (PlannedLoad(b"k", 0, own_blocks, "cpu", "", 1, 1),) if own_blocks else ()
    chunks = (
        PlannedChunk(40, (PlannedLoad(b"b", 0, 2, "cpu", "", 1, 1),)),
        PlannedChunk(120, (PlannedLoad(b"e", 0, 3, "cpu", "", 1, 1),)),
    )
    expected = PlanExpectation(load_s=1, recompute_s=2, deadline_s=3, device_tokens=device_tokens)
    blend = PlannedBlend(chunks, ratio, check_layer=2, seconds=0.5)
    return Plan(1, own, BLENDS, now=1.0, epoch=1, expected=expected, extras={BLEND: blend})


def ended(source: Source, wanted: GenerateRequest, **usage: int) -> str:
    """The reason that the client hears."""
    counts = {"device": 0, "cpu": 0, "redis": 0, **usage}
    counts["recomputed"] = PROMPT - counts["device"] - counts["cpu"] - counts["redis"]
    last: Any = SimpleNamespace(
        kv_transfer_params={KV_CACHE_USAGE: counts}, metrics=SimpleNamespace(scheduled_ts=1.0, first_token_ts=2.0)
    )
    plan = asyncio.run(PromptPlans(source, BLOCK).ask(wanted))
    plan.begun()
    plan.ended(last)
    return str(counts["reason"])


def test_chunks_are_asked_for_with_the_terms_of_the_replica() -> None:
    source = Source()
    asyncio.run(PromptPlans(source, BLOCK).ask(request(FIRST, SECOND)))
    chunks = [ChunkQuery(40, 80, [b"a", b"b"]), ChunkQuery(120, 100, [b"c", b"d", b"e"])]  # type: ignore[list-item]
    assert source.blends == [BlendQuery(chunks, 0.25, TERMS)]


def test_nothing_is_asked_where_nothing_can_be_blended() -> None:
    for source, wanted in ((Source(terms=None), request(FIRST)), (Source(), request())):
        asyncio.run(PromptPlans(source, BLOCK).ask(wanted))
        assert source.blends == [None]
    source = Source()
    asyncio.run(PromptPlans(source, BLOCK).ask(request(FIRST, prompt_logprobs=1)))
    assert source.blends == [], "a prompt that is computed whole is not planned"


@pytest.mark.parametrize(
    "chunk",
    [
        PromptChunk(-1, 80, [b"a"]),
        PromptChunk(0, 0, [b"a"]),
        PromptChunk(300, 80, [b"a", b"b"]),
        PromptChunk(0, 64, [b"a", b"b", b"c"]),
        PromptChunk(0, 20, []),
        PromptChunk(100, 64, [b"a", b"b"]),
    ],
)
def test_a_chunk_that_cannot_be_is_not_sent(chunk: PromptChunk) -> None:
    found = blend_query(request(FIRST, chunk), TERMS, BLOCK)
    assert found is not None
    assert [each.start_token for each in found.chunks] == [40]


def test_no_more_hashes_are_sent_than_the_prompt_has_blocks() -> None:
    many = [PromptChunk(0, PROMPT, [b"a"] * 10) for _ in range(1000)]
    found = blend_query(request(*many), TERMS, BLOCK)
    assert found is not None
    assert sum(len(chunk.hashes) for chunk in found.chunks) == 10


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_that_cannot_be_is_no_blend(ratio: float) -> None:
    assert blend_query(request(FIRST, ratio=ratio), TERMS, BLOCK) is None


def test_a_blended_prompt_did_not_fail_to_load() -> None:
    assert ended(Source(planned()), request(FIRST), cpu=120, blended=120) == "blend"
    assert ended(Source(planned(2)), request(FIRST), cpu=64 + 100, blended=100) == "blend"
    assert ended(Source(planned(ratio=1.0)), request(FIRST)) == "blend", "all was computed anew, as was asked"
    assert ended(Source(planned()), request(FIRST), device=9 * BLOCK) == "blend", "the device had it by then"


def test_a_prefix_or_a_blend_that_did_not_come_is_said() -> None:
    assert ended(Source(planned(2)), request(FIRST), cpu=100, blended=100) == LOAD_FAILED
    assert ended(Source(planned()), request(FIRST)) == LOAD_FAILED
    assert ended(Source(planned(2)), request(FIRST), cpu=64) == LOAD_FAILED


def test_what_a_blended_prompt_computes_is_no_rate_of_prefills() -> None:
    source = Source(planned())
    ended(source, request(FIRST), device=0, redis=120, blended=120)
    assert source.samples == []
    source = Source()
    source.answer = Plan(reason=PlanReason.COLD, now=1.0, epoch=1)
    ended(source, request(FIRST))
    assert source.samples == [("prefill", PROMPT, 1.0, 0)]


def test_a_blend_counts_as_queued_with_what_it_computes() -> None:
    async def check() -> None:
        plans = PromptPlans(Source(planned(1)), BLOCK)
        plan = await plans.ask(request(FIRST))
        # From 32 to 192 it blends 64 + 72 of 160 tokens, of which a quarter is computed in 8 of 10 layers.
        share = 0.2 + 0.8 * (24 + 0.25 * 136) / 160
        assert plans.queued_tokens == PROMPT - 32 - int(160 * (1 - share))
        plan.begun()
        assert plans.queued_tokens == 0

    asyncio.run(check())
