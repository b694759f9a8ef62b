"""A sparse prefix is attended to as by a model that sees only what is kept: exactly, in float32, whatever happens."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from live_engine import BLOCK, PATIENCE_S, SEGMENT_BLOCKS, LiveEngine, usage
from masked_reference import MaskedReference
from sparse_asker import ANSWER, LAYERS, SEGMENT, SparseAsker
from sparse_port import Thinned

from load_tests.harness.engine import greedy, prompt
from load_tests.harness.patience import patience, until

LONGEST_STEP = 512


def budgets(seed: int, segments: int) -> list[list[int]]:
    """Of each segment, the blocks that each layer keeps. One layer keeps all, another nothing."""
    draw = random.Random(seed)
    whole, none = draw.sample(range(LAYERS), 2)
    shares = [draw.randint(0, SEGMENT_BLOCKS) for _ in range(LAYERS)]
    shares[whole], shares[none] = SEGMENT_BLOCKS, 0
    return [list(shares) for _ in range(segments)]


HALF = [[4, 2, 1, 0, 3, 2]] * 2


def check(reference: MaskedReference, tokens: list[int], thinned: Thinned, output: Any) -> None:
    """The answer is the reference's, token by token."""
    (answer,) = output.outputs
    answered = list(answer.token_ids)
    log_p = reference.log_probabilities(tokens + answered, thinned.blocks * BLOCK, thinned.kept)
    expected = log_p[len(tokens) - 1 : -1]
    assert answered == expected.argmax(-1).tolist()
    for number, token in enumerate(answered):
        assert abs(answer.logprobs[number][token].logprob - expected[number, token].item()) <= 1e-5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_with_random_budgets_and_a_choice_per_head_beside_ordinary_requests(
    asker: SparseAsker, reference: MaskedReference, seed: int
) -> None:
    engine, segments = asker.engine, 1 + seed
    answered = SEGMENT if seed == 1 else ANSWER
    tokens = prompt(seed, segments * SEGMENT + 40)
    thinned = asker.thin(tokens, budgets(seed, segments), seed)
    beside = [prompt(100 + seed, 70), prompt(200 + seed, 200)]
    alone = [engine.ask(each, answered, planned=False)[0] for each in beside]
    engine.clear_device()

    others = [engine.start(engine.answer(each, greedy(answered), planned=False)) for each in beside]
    output = asker.start(tokens, thinned, answered).result(patience(PATIENCE_S))

    assert [list(other.result(patience(PATIENCE_S)).outputs[0].token_ids) for other in others] == alone
    check(reference, tokens, thinned, output)
    assert usage(output) == {"device": 0, "cpu": 0, "redis": segments * SEGMENT, "recomputed": 40}
    whole = Thinned(thinned.plan, thinned.blocks, [[list(range(segments * SEGMENT))] * 2] * LAYERS)
    with pytest.raises(AssertionError):
        check(reference, tokens, whole, output)  # the reference can tell


def test_the_rest_of_a_long_prompt_comes_in_chunks(asker: SparseAsker, reference: MaskedReference) -> None:
    tokens = prompt(11, 2 * SEGMENT + LONGEST_STEP + 300)
    thinned = asker.thin(tokens, HALF)
    check(reference, tokens, thinned, asker.start(tokens, thinned, 8).result(patience(PATIENCE_S)))


def test_two_prefixes_with_other_budgets_in_one_batch(asker: SparseAsker, reference: MaskedReference) -> None:
    first, second = prompt(12, 2 * SEGMENT + 20), prompt(13, 3 * SEGMENT + 50)
    thinned = [asker.thin(first, HALF), asker.thin(second, budgets(5, 3))]
    started = [asker.start(tokens, each) for tokens, each in zip((first, second), thinned, strict=True)]
    for tokens, each, output in zip((first, second), thinned, started, strict=True):
        check(reference, tokens, each, output.result(patience(PATIENCE_S)))


def test_a_second_request_finds_the_prefix_on_the_device(asker: SparseAsker, reference: MaskedReference) -> None:
    tokens = prompt(14, 2 * SEGMENT + 20)
    thinned = asker.thin(tokens, HALF)
    asker.start(tokens, thinned, 4).result(patience(PATIENCE_S))
    other = tokens[: 2 * SEGMENT] + prompt(15, 45)

    output = asker.start(other, thinned).result(patience(PATIENCE_S))

    check(reference, other, thinned, output)
    assert usage(output)["device"] == 2 * SEGMENT
    assert asker.port.sparse_fetches == 1


def test_requests_that_come_together_share_one_load(asker: SparseAsker, reference: MaskedReference) -> None:
    tokens = prompt(16, 2 * SEGMENT + 20)
    thinned = asker.thin(tokens, HALF)
    started = [asker.start(tokens, thinned, 16) for _ in range(3)]
    for each in started:
        check(reference, tokens, thinned, each.result(patience(PATIENCE_S)))
    assert asker.port.sparse_fetches == 1


def test_who_shares_half_of_a_prefix_reads_nothing_of_it(asker: SparseAsker, reference: MaskedReference) -> None:
    tokens = prompt(17, 2 * SEGMENT + 20)
    thinned = asker.thin(tokens, HALF)
    asker.start(tokens, thinned, 4).result(patience(PATIENCE_S))
    half = asker.port.thin(asker.engine.hashes(tokens), HALF[:1])
    other = tokens[:SEGMENT] + prompt(18, 50)

    output = asker.start(other, half).result(patience(PATIENCE_S))

    check(reference, other, half, output)
    assert usage(output)["device"] == 0


def test_what_is_left_of_a_prefix_is_loaded_anew_whole(asker: SparseAsker, reference: MaskedReference) -> None:
    tokens = prompt(19, 2 * SEGMENT + 20)
    thinned = asker.thin(tokens, HALF)
    asker.start(tokens, thinned, 4).result(patience(PATIENCE_S))
    hashes = [block.block_hash for block in _blocks_of(asker, tokens, thinned)]
    asker.engine.on_engine_thread(lambda: asker.engine.reuse.control.evict([each[:32] for each in hashes[5:]]))
    assert asker.on_device(tokens, thinned) == 5

    check(reference, tokens, thinned, asker.start(tokens, thinned).result(patience(PATIENCE_S)))
    assert asker.port.sparse_fetches == 2
    assert asker.on_device(tokens, thinned) >= thinned.blocks


def test_preempted_it_loads_anew_and_goes_on(asker: SparseAsker, reference: MaskedReference) -> None:
    tokens = prompt(20, 2 * SEGMENT + 20)
    thinned = asker.thin(tokens, HALF)
    output = _preempted(asker, tokens, thinned)
    check(reference, tokens, thinned, output)
    assert asker.port.sparse_fetches == 2


def test_preempted_without_its_segments_it_goes_on_densely(asker: SparseAsker, reference: MaskedReference) -> None:
    engine, tokens = asker.engine, prompt(21, 2 * SEGMENT + 20)
    thinned = asker.thin(tokens, HALF)
    output = _preempted(asker, tokens, thinned, then=asker.port.sparse.clear)
    answered = list(output.outputs[0].token_ids)
    # From some token on it is what the dense model says after those before.
    whole = [[list(range(2 * SEGMENT))] * 2] * LAYERS
    log_p = {
        name: reference.log_probabilities(tokens + answered, 2 * SEGMENT, kept)[len(tokens) - 1 : -1].argmax(-1)
        for name, kept in (("sparse", thinned.kept), ("dense", whole))
    }
    same = {name: [a == b for a, b in zip(answered, each.tolist(), strict=True)] for name, each in log_p.items()}
    turn = same["sparse"].index(False) if False in same["sparse"] else len(answered)
    assert all(same["dense"][turn:])
    assert 3 <= turn < len(answered)
    assert asker.path.lost > 0
    assert asker.on_device(tokens, thinned) == 0
    assert engine.ask(tokens)[0] == _dense_answer(asker, tokens)


@pytest.mark.parametrize("spoil", [lambda sealed: None, lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1])])
def test_a_prefix_that_does_not_come_is_computed_under_the_plain_names(
    asker: SparseAsker, reference: MaskedReference, spoil: Any
) -> None:
    engine, tokens = asker.engine, prompt(22, 2 * SEGMENT + 20)
    thinned = asker.thin(tokens, HALF)
    dense = _dense_answer(asker, tokens)
    last = asker.port.sparse[thinned.sparse.loads[-1].key]
    asker.port.spoil = lambda sealed: spoil(sealed) if sealed == last else sealed
    lost = asker.path.lost

    output = asker.start(tokens, thinned, 8).result(patience(PATIENCE_S))

    assert list(output.outputs[0].token_ids) == dense
    assert asker.path.lost == lost + 1
    assert asker.on_device(tokens, thinned) == 0
    asker.port.spoil = lambda sealed: sealed
    check(reference, tokens, thinned, asker.start(tokens, thinned).result(patience(PATIENCE_S)))
    assert engine.ask(tokens)[0] == dense


def test_whoever_waited_for_a_load_that_failed_computes_too(asker: SparseAsker) -> None:
    tokens = prompt(23, 2 * SEGMENT + 20)
    thinned = asker.thin(tokens, HALF)
    dense = _dense_answer(asker, tokens)
    asker.port.spoil = lambda sealed: None
    started = [asker.start(tokens, thinned, 8) for _ in range(3)]
    assert [list(each.result(patience(PATIENCE_S)).outputs[0].token_ids) for each in started] == [dense] * 3
    assert asker.on_device(tokens, thinned) == 0


@pytest.mark.parametrize("loading", [False, True])
def test_aborted_it_leaves_nothing_behind(asker: SparseAsker, reference: MaskedReference, loading: bool) -> None:
    engine, tokens = asker.engine, prompt(24, 2 * SEGMENT + 20)
    thinned = asker.thin(tokens, HALF)
    asker.port.before_fetch = lambda: until(lambda: not loading or not asker.entered(), "it was aborted")

    async def leave() -> None:
        stream = asker.stream(tokens, thinned, 500)
        if loading:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.to_thread(until, lambda: asker.port.sparse_fetches, "it loads")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await anext(stream)
        await stream.aclose()

    engine.run(leave())
    engine.settle()
    assert not asker.entered()
    until(lambda: engine.blocks_in_use() == 0, "its blocks come back")
    asker.port.before_fetch = lambda: None
    check(reference, tokens, thinned, asker.start(tokens, thinned, 16).result(patience(PATIENCE_S)))


def _dense_answer(asker: SparseAsker, tokens: list[int], max_tokens: int = 8) -> list[int]:
    """What the engine answers without any reuse."""
    engine = asker.engine
    port, engine.port = engine.port, type(asker.port)(engine.reuse.copier.layout)
    engine.clear_device()
    answer, _ = engine.ask(tokens, max_tokens)
    engine.clear_device()
    engine.port = port
    return answer


def _blocks_of(asker: SparseAsker, tokens: list[int], thinned: Thinned) -> list[Any]:
    from kvmanager.segments.keys import block_hashes

    pool = asker.engine.scheduler.kv_cache_manager.block_pool
    hashes: Any = block_hashes(tokens, BLOCK, thinned.salt(asker.engine.salt))[: thinned.blocks]
    return [pool.get_cached_block(each, [0])[0] for each in hashes]


def _preempted(asker: SparseAsker, tokens: list[int], thinned: Thinned, then: Any = lambda: None) -> Any:
    """The answer of a request that is preempted after some tokens, and whose blocks are forgotten then."""
    engine: LiveEngine = asker.engine

    async def ask() -> Any:
        last = None
        preempted = False
        async for output in asker.stream(tokens, thinned, 96):
            last = output
            if not preempted and len(output.outputs[0].token_ids) >= 3:
                preempted = True

                def preempt() -> None:
                    then()
                    assert engine.thread.core.reset_prefix_cache(reset_running_requests=True)

                await asyncio.wrap_future(engine.thread.call(preempt))
        return last

    return engine.run(ask())
