"""A model over two ranks: an engine loads what one stored, whole for both ranks or not at all."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_engine import BLOCK, PATIENCE_S, LiveEngine
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from configs.settings import load_settings
from deployments.engine.checks import check_engine_config, untested_over_ranks
from deployments.engine.connector import CrossKVConnector
from deployments.engine.engine_args import block_bytes, engine_config
from deployments.engine.groups import ONE_DENSE
from deployments.engine.model_identity import model_identity
from deployments.engine.ranks import map_caches, share_caches
from deployments.engine.resume.crossing import with_resumed
from deployments.engine.wiring import why_not_moved
from deployments.transfer import segment_copy
from kvmanager.moves.directives import Offload, Outcome
from kvmanager.segments.format import read_header
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience, until
from tests.sizes import LONG

ANSWER = 24
FIRST = prompt(1, 600)
PROMPTS = (FIRST, FIRST[:384] + prompt(2, 150), prompt(3, 300), prompt(4, 320))
"""By itself, parting from the first, another one, and one of whole blocks."""


def start(model: Path) -> LiveEngine:
    return LiveEngine(model, "float32", tensor_parallel_size=2)


@dataclass
class World:
    """An engine, and what one answered to `PROMPTS` cold, and stored of them: in long runs another one."""

    engine: LiveEngine
    cold: list[list[int]]
    stored: dict[bytes, Any]


@pytest.fixture(scope="module")
def world(demo_model: Path, own_engine: Any) -> World:
    engine = own_engine.start(lambda: start(demo_model), LiveEngine.close)
    cold = []
    for tokens in PROMPTS:
        engine.clear_device()
        said, came = engine.ask(tokens, ANSWER, planned=False)
        assert came["recomputed"] == len(tokens)
        cold.append(said)
    stored = dict(engine.port.segments)
    if LONG:
        engine = own_engine.start(lambda: start(demo_model), LiveEngine.close)
    return World(engine, cold, stored)


@pytest.fixture(autouse=True)
def _whole(request: pytest.FixtureRequest) -> Iterator[None]:
    """The port has what was stored, and after a test nothing of it is left in the engine."""
    if "world" not in request.fixturenames:
        yield
        return
    world: World = request.getfixturevalue("world")
    world.engine.port = port = MemoryPort()
    port.segments = dict(world.stored)
    world.engine.clear_device()
    yield
    if not world.engine.llm.errored:
        world.engine.settle()
        assert world.engine.blocks_in_use() == 0


def test_an_engine_loads_what_was_stored_and_answers_as_when_it_computed_it(world: World) -> None:
    for tokens, said in zip(PROMPTS, world.cold, strict=True):
        world.engine.clear_device()
        again, came = world.engine.ask(tokens, ANSWER)
        assert again == said
        assert came["cpu"] == (len(tokens) - 1) // BLOCK * BLOCK


def test_a_segment_has_the_layers_of_one_rank_after_those_of_the_other(world: World) -> None:
    copier = world.engine.reuse.copier
    config = world.engine.llm.vllm_config
    layers = config.model_config.get_num_layers(config.parallel_config)
    heads = config.model_config.get_total_num_kv_heads()
    assert copier.form_of(1)[0] == (2 * layers, 2, BLOCK, heads // 2, config.model_config.get_head_size())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_byte_of_either_rank_that_is_not_what_was_stored_has_both_compute_the_prompt(world: World, rank: int) -> None:
    port = world.engine.port

    def spoil(sealed: bytes) -> bytes:
        at = read_header(sealed).body_offset if rank == 0 else len(sealed) - 1
        return sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]

    port.spoil = spoil
    again, came = world.engine.ask(FIRST, ANSWER)
    assert (again, came["cpu"]) == (world.cold[0], 0)
    assert port.bad


@pytest.mark.parametrize("rank", [0, 1])
def test_zeros_in_the_place_of_one_ranks_kv_change_the_answer(
    world: World, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Else equal answers would show nothing."""
    scatter = segment_copy.scatter

    def of_one_rank(layers: Any, ids: Any, layout: Any, values: torch.Tensor) -> None:
        kept = values.clone()
        kept.chunk(2)[rank].zero_()
        scatter(layers, ids, layout, kept)

    monkeypatch.setattr(segment_copy, "scatter", of_one_rank)
    assert world.engine.ask(FIRST, ANSWER)[0] != world.cold[0]


def test_what_a_tier_does_not_bring_is_computed(world: World) -> None:
    brought = iter([True])
    world.engine.port.spoil = lambda sealed: sealed if next(brought, None) else None
    again, came = world.engine.ask(FIRST, ANSWER)
    assert again == world.cold[0]
    assert 0 < came["cpu"] < len(FIRST) - BLOCK, "the first segment came"


def test_a_load_that_is_late_fails_and_the_request_does_not(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world.engine.transfer, "_load_deadline_s", 0.0)
    again, came = world.engine.ask(FIRST, ANSWER)
    assert (again, came["cpu"]) == (world.cold[0], 0)


def test_another_request_decodes_while_a_load_hangs(world: World) -> None:
    engine = world.engine
    let_go = threading.Event()
    engine.port.before_fetch = lambda: let_go.wait(patience(PATIENCE_S))
    loading = engine.start(engine.answer(FIRST, greedy(ANSWER)))
    said = engine.run(engine.answer(PROMPTS[2], greedy(ANSWER), planned=False))
    assert list(said.outputs[0].token_ids) == world.cold[2]
    assert not loading.done()
    let_go.set()
    assert list(loading.result(patience(PATIENCE_S)).outputs[0].token_ids) == world.cold[0]


def test_a_directive_brings_a_prompt_to_all_ranks(world: World) -> None:
    assert world.engine.onboard(FIRST).result(patience(PATIENCE_S)).outcome is Outcome.DONE
    again, came = world.engine.ask(FIRST, ANSWER)
    assert again == world.cold[0]
    assert came["device"] > 0


def test_a_directive_takes_a_prompt_from_all_ranks(world: World) -> None:
    engine = world.engine
    engine.port = MemoryPort()
    engine.ask(FIRST, ANSWER, planned=False)
    stored = engine.port.segments
    engine.port = MemoryPort()  # the tier was lost
    spans = sorted((span for span, _ in stored.values()), key=lambda span: span.start_block)
    assert engine.direct(Offload(tuple(spans))).result(patience(PATIENCE_S)).outcome is Outcome.DONE
    assert engine.port.segments == stored


def test_a_seeded_prompt_longer_than_a_step_gets_the_tokens_that_it_gets_alone(world: World) -> None:
    """vLLM turns generators back for it, which ends an engine on a CPU; each rank samples."""
    engine, tokens = world.engine, prompt(9, 700)
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=8, ignore_eos=True)
    alone = engine.run(engine.answer(tokens, params, planned=False)).outputs[0].token_ids
    engine.clear_device()

    async def while_one_decodes() -> Any:
        decoder = engine.stream(PROMPTS[2], greedy(600), planned=False)
        await anext(decoder)
        output = await engine.answer(tokens, params, planned=False)
        assert not (await anext(decoder)).finished, "it decoded all the time"
        await decoder.aclose()
        return output

    assert engine.run(while_one_decodes()).outputs[0].token_ids == alone


def test_requests_that_are_preempted_answer_as_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, pool = world.engine, world.engine.scheduler.kv_cache_manager.block_pool
    preempted: list[str] = []
    preempt = engine.scheduler._preempt_request

    def noted(request: Any, *rest: Any, **more: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *rest, **more)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", noted)
    needed = sum(-(-(len(tokens) + 1) // BLOCK) for tokens in PROMPTS[2:])
    free = engine.on_engine_thread(pool.get_num_free_blocks)
    taken = engine.on_engine_thread(lambda: pool.get_new_blocks(free - needed))
    try:
        runs = [engine.start(engine.answer(tokens, greedy(4 * BLOCK), planned=False)) for tokens in PROMPTS[2:]]
        answers = [list(run.result(patience(PATIENCE_S)).outputs[0].token_ids)[:ANSWER] for run in runs]
        engine.settle()
    finally:
        engine.on_engine_thread(lambda: pool.free_blocks(taken))
    assert preempted
    assert answers == world.cold[2:]


def test_an_answer_that_was_begun_elsewhere_goes_on_in_all_ranks(world: World) -> None:
    params = greedy(ANSWER, output_kind=RequestOutputKind.DELTA, extra_args=with_resumed({}, world.cold[2][:5]))

    async def rest() -> list[int]:
        stream = world.engine.stream(PROMPTS[2], params, planned=False)
        return [token async for output in stream for token in output.outputs[0].token_ids]

    assert world.engine.run(rest()) == world.cold[2][5:]


def test_paths_that_reach_into_the_step_are_off(world: World) -> None:
    assert list(world.engine.reuse.paths) == ["preempted", "whole"]
    assert not world.engine.reuse.layerwise.saves


def test_a_rank_that_is_killed_ends_the_engine_though_it_is_idle(world: World) -> None:
    """The last test with this engine. Its memory needs no end: it has no name."""
    engine = world.engine
    executor: Any = engine.thread.core.model_executor
    ranks = [worker.proc for worker in executor.workers]
    os.kill(ranks[1].pid, signal.SIGKILL)
    until(lambda: engine.llm.errored, "the engine is dead")
    with pytest.raises(EngineDeadError):
        engine.run(engine.answer(FIRST, greedy(2)))
    until(lambda: not any(rank.is_alive() for rank in ranks), "the other rank has ended too")


# Without an engine.


def test_both_sides_see_what_either_writes_and_the_memory_outlives_a_rank() -> None:
    whole = torch.zeros(2, 3, 8)
    caches = {"a": whole[0], "b": whole[1], "c": torch.zeros(5, dtype=torch.bfloat16)}
    shared = share_caches(caches, {name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()})
    mapped = map_caches(pickle.loads(pickle.dumps(shared)))
    assert {name: (cache.shape, cache.dtype) for name, cache in mapped.items()} == {
        name: (cache.shape, cache.dtype) for name, cache in caches.items()
    }
    caches["a"][1, 2] = 7
    mapped["b"][2] = 3
    mapped["c"][4] = 2
    assert mapped["a"][1, 2] == 7
    assert caches["b"].sum() == 24
    assert caches["c"].tolist() == [0, 0, 0, 0, 2]
    os.close(shared.fd)
    caches.clear()
    mapped["c"][0] = 1
    assert mapped["c"].tolist() == [1, 0, 0, 0, 2], "a load that ends after its rank harms nothing"


def test_a_rank_that_has_ended_cannot_be_mapped() -> None:
    cache = torch.zeros(4)
    shared = share_caches({"a": cache}, {"a": SimpleNamespace(kv_cache=cache)})
    with pytest.raises(OSError, match="No such file"):
        map_caches(replace(shared, pid=2**22 + 1))


def test_a_layer_with_a_tensor_of_its_own_is_not_moved() -> None:
    cache = torch.ones(4)
    with pytest.raises(ValueError, match="layer a keeps"):
        share_caches({"a": cache}, {"a": SimpleNamespace(kv_cache=cache[:])})
    assert cache.tolist() == [1.0] * 4


def of_ranks(model: Path, ranks: int) -> Any:
    engine = {"device_blocks": 100, "tensor_parallel_size": ranks}
    return load_settings({"model": str(model), "dtype": "float32", "engine": engine})


def test_the_number_of_ranks_is_in_the_name_of_kv_and_one_rank_has_the_name_it_had(demo_model: Path) -> None:
    one, two = (of_ranks(demo_model, ranks) for ranks in (1, 2))
    names = [model_identity(engine_config(settings), settings) for settings in (one, two)]
    assert "ranks" not in json.loads(names[0].computation)
    assert json.loads(names[1].computation)["ranks"] == 2
    assert names[0].fingerprint() != names[1].fingerprint()


def test_bytes_are_those_of_all_ranks_and_vllm_reserves_a_ranks_share_in_each(demo_model: Path) -> None:
    one, two = (engine_config(of_ranks(demo_model, ranks)) for ranks in (1, 2))
    assert block_bytes(one) == block_bytes(two)
    assert two.cache_config.kv_cache_memory_bytes == one.cache_config.kv_cache_memory_bytes // 2
    assert (two.parallel_config.distributed_executor_backend, two.parallel_config.world_size) == ("mp", 2)


@pytest.mark.parametrize(
    ("part", "name", "value", "reason"),
    [
        ("hf_text_config", "layer_types", ["sliding_attention", "full_attention"], "attends to windows"),
        ("cache_config", "cache_dtype", "fp8", "keeps its KV as fp8"),
        ("", "lora_config", object(), "has LoRA adapters"),
        ("", "speculative_config", SimpleNamespace(method="ngram"), "speculates"),
        ("model_config", "get_total_num_kv_heads", lambda: 1, "has fewer KV heads than ranks"),
    ],
)
def test_what_no_test_has_moved_over_ranks_is_not_shared_and_is_named(
    demo_model: Path, part: str, name: str, value: Any, reason: str
) -> None:
    config = engine_config(of_ranks(demo_model, 2))
    assert not any(untested_over_ranks(config))
    place: Any = config.model_config.hf_text_config if part == "hf_text_config" else getattr(config, part, config)
    setattr(place, name, value)
    assert reason in next(untested_over_ranks(config))
    config.parallel_config.tensor_parallel_size = 1
    assert not any(untested_over_ranks(config))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("distributed_executor_backend", "ray", "processes of one node"),
        ("nnodes", 2, "processes of one node"),
        ("world_size", 4, "all layers"),
        ("decode_context_parallel_size", 2, "KV of different tokens"),
    ],
)
def test_other_kinds_of_parallelism_are_refused_in_words(demo_model: Path, name: str, value: Any, reason: str) -> None:
    config = engine_config(of_ranks(demo_model, 2))
    check_engine_config(config)
    setattr(config.parallel_config, name, value)
    with pytest.raises(ValueError, match=reason):
        check_engine_config(config)


def test_where_one_rank_cannot_be_mapped_none_is() -> None:
    cache = torch.zeros(4)
    shared = share_caches({"a": cache}, {"a": SimpleNamespace(kv_cache=cache)})
    half = SimpleNamespace(rank_caches=())
    metadata = {0: shared, 1: replace(shared, pid=2**22 + 1)}
    CrossKVConnector.set_xfer_handshake_metadata(half, metadata)  # type: ignore[arg-type]
    assert half.rank_caches == ()


def test_ranks_whose_kv_cannot_be_mapped_are_no_reason_not_to_serve(demo_model: Path) -> None:
    connector = SimpleNamespace(unsupported=None, groups=ONE_DENSE, rank_caches=())
    thread: Any = SimpleNamespace(scheduler=SimpleNamespace(connector=connector))
    why = why_not_moved(thread, engine_config(of_ranks(demo_model, 2)), of_ranks(demo_model, 2))
    assert why is not None
    assert "ranks' processes cannot share it" in why
