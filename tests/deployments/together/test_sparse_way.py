"""Tolerant prompts' KV becomes sparse on its way to a real Redis, and is attended to exactly as what was kept.

Real engine in float32, manager, CPU tier, prefetch workers and Redis; the reference is a masked model.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "load_paths" / "sparse"))

import pytest
from masked_reference import MaskedReference

from configs.settings import load_settings
from deployments.protocol.wire import KV_CACHE_USAGE
from deployments.segment_store.endpoint import open_store
from deployments.segment_store.segment_codecs import Coding, FormLevel
from deployments.segment_store.sparse.budget_files import find_budgets
from deployments.segment_store.sparse.segments import open_sparse
from kvmanager.segments.format import read_header
from kvmanager.segments.keys import TOLERANT, block_hashes, cache_salt
from load_tests.harness import tiered_engine
from load_tests.harness.engine import SECRET, greedy, prompt
from load_tests.harness.tiered_engine import TieredEngine
from load_tests.harness.tiers import own_redis

pytestmark = pytest.mark.server

SEGMENT = 128
CLOSE = 1e-5


def settings(model: Path, sparse: str) -> Any:
    kv = {
        "segment_tokens": SEGMENT, "cpu_tier_bytes": 64 << 20, "redis_bytes": 64 << 20, "prefetch_workers": 1,
        "sparse": sparse, "load_or_recompute": "load", "redis_min_uses": 1, "load_deadline_s": 30.0,
    }  # fmt: skip
    return load_settings({"model": str(model), "dtype": "float32", "kv": kv, "engine": {"device_blocks": 200}})


@pytest.fixture(scope="module")
def engine(demo_model: Path, own_engine: Any, ray_cluster: Any) -> Iterator[Any]:
    """Its prompts are tolerant ones, and what is kept of them is stored as it is: the codec inside loses nothing."""
    wanted = settings(demo_model, "layers")
    with own_redis(64 << 20) as server, pytest.MonkeyPatch.context() as patch:
        ordinary = tiered_engine.redis_config
        coding = Coding("raw", "raw", form=FormLevel("sparse", "layers"))
        of_model = {"coding": coding, "model": wanted.model_source}
        patch.setattr(tiered_engine, "redis_config", lambda *args: replace(ordinary(*args), **of_model))
        made: Any = own_engine.start(lambda: TieredEngine("sparse", wanted, server), lambda engine: engine.close())
        made.fidelity, made.salt = TOLERANT, cache_salt(SECRET, made.fingerprint, "", TOLERANT)
        made.server, made.coding = server, coding
        with asyncio.Runner() as runner:  # vLLM answers on one event loop only
            made.run = runner.run
            yield made
            own_engine.end()


async def ask(engine: Any, tokens: list[int], max_tokens: int = 24) -> Any:
    return [output async for output in engine.stream(tokens, greedy(max_tokens, logprobs=0))][-1]


def usage(output: Any) -> dict[str, int]:
    counts = output.kv_transfer_params[KV_CACHE_USAGE]
    return {tier: counts[tier] for tier in ("device", "cpu", "redis", "recomputed")}


def kept_in_redis(engine: Any, model: Path, tokens: list[int]) -> list[list[list[int]]]:
    """Of each layer and head the tokens of the prompt's segments that Redis has."""
    config = tiered_engine.redis_config("sparse", engine.server, settings(model, "layers"))
    store = open_store(config.endpoint(config.url, engine.fingerprint, SECRET, b""))
    layers = len(engine.reuse.copier.layers)
    budgets = find_budgets(str(model), "layers", layers)
    kept: list[list[list[int]]] = []
    hashes = block_hashes(tokens, engine.block_tokens, engine.salt)
    blocks = SEGMENT // engine.block_tokens
    for number in range(len(tokens) // SEGMENT):
        key = hashes[(number + 1) * blocks - 1]
        sealed = store.get(key)
        assert sealed is not None
        header = read_header(sealed)
        assert (header.codec, header.fidelity) == ("sparse", TOLERANT)
        opened = open_sparse(
            sealed, key=key, fingerprint=engine.fingerprint, shape=header.shape, dtype="float32", num_blocks=blocks,
            budgets=budgets, inner_codec=lambda *_: None,
        )  # fmt: skip
        for layer, of_layer in enumerate(opened):
            if len(kept) <= layer:
                kept.append([[] for _ in of_layer.index])
            for head, index in enumerate(of_layer.index):
                kept[layer][head] += [number * SEGMENT + int(token) for token in index]
    return kept


def check(reference: MaskedReference, tokens: list[int], kept: list[list[list[int]]], output: Any) -> None:
    """The answer is that of a model which sees only what was kept."""
    (answer,) = output.outputs
    answered = list(answer.token_ids)
    prefix = len(tokens) // SEGMENT * SEGMENT
    expected = reference.log_probabilities(tokens + answered, prefix, kept)[len(tokens) - 1 : -1]
    assert answered == expected.argmax(-1).tolist()
    for number, token in enumerate(answered):
        assert abs(answer.logprobs[number][token].logprob - expected[number, token].item()) <= CLOSE


def test_what_was_saved_becomes_sparse_in_redis_and_is_attended_to_as_it_was_kept(
    engine: Any, demo_model: Path
) -> None:
    tokens, prefix = prompt(41, 3 * SEGMENT + 20), 3 * SEGMENT

    async def check_all() -> None:
        dense = await ask(engine, tokens)
        assert usage(dense)["recomputed"] == len(tokens)
        await engine.rest()
        kept = kept_in_redis(engine, demo_model, tokens)
        assert any(len(head) < prefix for layer in kept for head in layer), "something was dropped"

        again = await ask(engine, tokens)
        assert usage(again)["redis"] == 0, "what the device has dense is read there"
        await engine.forget("cpu")
        sparse = await ask(engine, tokens)
        assert usage(sparse) == {"device": 0, "cpu": 0, "redis": prefix, "recomputed": 20}
        reference = MaskedReference(demo_model)
        check(reference, tokens, kept, sparse)
        with pytest.raises(AssertionError):
            check(reference, tokens, [[list(range(prefix))] * len(layer) for layer in kept], sparse)

        on_device = await ask(engine, tokens)
        assert usage(on_device)["device"] == prefix, "under the names of its own"
        check(reference, tokens, kept, on_device)
        assert engine.tiers.stored_bytes()["cpu"] == 0, "no CPU tier takes a sparse segment for a dense one"

    engine.run(check_all())


def test_an_index_that_is_read_from_redis_anew_knows_what_is_sparse(engine: Any, demo_model: Path) -> None:
    tokens, prefix = prompt(42, 2 * SEGMENT + 20), 2 * SEGMENT

    async def check_all() -> None:
        await ask(engine, tokens, 1)
        await engine.rest()
        kept = kept_in_redis(engine, demo_model, tokens)
        await engine.forget("cpu")
        engine.tiers.restart_redis(engine.coding)
        engine.keep_alive()
        sparse = await ask(engine, tokens)
        assert usage(sparse)["redis"] == prefix
        check(MaskedReference(demo_model), tokens, kept, sparse)

    engine.run(check_all())


def test_who_presents_nothing_sparse_computes_and_loads_nothing_of_it(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(43, 2 * SEGMENT + 40)

    async def check_all() -> None:
        dense = await ask(engine, tokens)
        await engine.forget("cpu")
        monkeypatch.setattr(engine._plans._source, "terms", {})
        mismatches = dict(engine.reuse.transfer.counters.mismatches)
        again = await ask(engine, tokens)
        assert usage(again)["recomputed"] == len(tokens)
        assert again.outputs[0].token_ids == dense.outputs[0].token_ids
        assert engine.reuse.transfer.counters.mismatches == mismatches

    engine.run(check_all())
