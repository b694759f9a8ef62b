"""A seeded request gets the tokens that it gets alone: in chunks, beside others, preempted, and after a failed load."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm
from live_engine import LiveEngine
from vllm import SamplingParams
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from deployments.engine.seeded_sampling import keep_seeds_exact
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import MemoryPort

LONGER_THAN_A_STEP = 1300  # tokens; a step computes 512


def seeded(seed: int = 7, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=12, ignore_eos=True, **options)


def answers(output: Any) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


async def beside_decoders(engine: LiveEngine, *requests: tuple[list[int], SamplingParams]) -> list[Any]:
    """The outputs of `requests`, which begin while two others decode: one greedy, one sampled without a seed."""
    unseeded = SamplingParams(temperature=0.9, max_tokens=150, ignore_eos=True)
    streams = [engine.stream(prompt(90 + i, 40), p, planned=False) for i, p in enumerate((greedy(150), unseeded))]
    for stream in streams:
        await anext(stream)
    outputs = await asyncio.gather(*(engine.answer(tokens, params, planned=False) for tokens, params in requests))
    assert all([not (await anext(stream)).finished for stream in streams]), "the decoders were there all the time"
    for stream in streams:
        await stream.aclose()
    return outputs


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 20}, {"top_p": 0.8, "min_p": 0.01}, {"logprobs": 2, "presence_penalty": 0.5}, {"n": 3}],
    ids=lambda options: "+".join(options) or "plain",
)
def test_a_long_seeded_prompt_beside_decoders_gets_the_tokens_it_gets_alone(
    engine: LiveEngine, options: dict[str, Any]
) -> None:
    tokens = prompt(1, LONGER_THAN_A_STEP)
    alone = answers(engine.run(engine.answer(tokens, seeded(**options), planned=False)))
    engine.clear_device()
    [beside] = engine.run(beside_decoders(engine, (tokens, seeded(**options))))

    assert engine.thread.error is None
    assert answers(beside) == alone
    assert len({tuple(answer) for answer in alone}) == options.get("n", 1), "each completion has a seed of its own"


def test_two_seeded_prompts_in_chunks_do_not_disturb_each_other(engine: LiveEngine) -> None:
    requests = [(prompt(seed, LONGER_THAN_A_STEP), seeded(seed)) for seed in (2, 3)]
    alone = [answers(engine.run(engine.answer(*request, planned=False))) for request in requests]
    engine.clear_device()
    together = engine.run(beside_decoders(engine, *requests))

    assert [answers(output) for output in together] == alone
    assert alone[0] != alone[1]


def test_a_seeded_request_that_was_preempted_goes_on_as_if_it_had_not_been(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(4, 700)
    params = seeded(top_k=40)
    params.max_tokens = 120
    alone = answers(engine.run(engine.answer(tokens, params, planned=False)))
    engine.clear_device()

    preempt = engine.scheduler._preempt_request
    preempted: list[str] = []

    def watch(request: Any, *rest: Any, **options: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *rest, **options)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", watch)

    async def crowd() -> list[Any]:
        # Four prompts fit the pool, their answers do not; the last one is preempted, and comes back beside a decoder.
        others = [(prompt(20 + i, 700), greedy(length)) for i, length in enumerate((200, 120, 120))]
        return await asyncio.gather(
            *(engine.answer(t, p, planned=False) for t, p in others), engine.answer(tokens, params, planned=False)
        )

    [*_, output] = engine.run(crowd())
    assert any(name.startswith(output.request_id) for name in preempted), "the seeded request was preempted"
    assert answers(output) == alone


@pytest.fixture
def layerwise(engine: LiveEngine) -> Iterator[LiveEngine]:
    engine.reuse.layerwise.choice.mode = "on"
    yield engine
    engine.reuse.layerwise.choice.mode = "off"


def test_a_token_that_a_failed_layerwise_load_threw_away_is_drawn_again(layerwise: LiveEngine) -> None:
    tokens = prompt(5, 500)
    alone = answers(layerwise.run(layerwise.answer(tokens, seeded(), planned=False)))
    layerwise.settle()
    layerwise.clear_device()
    assert isinstance(layerwise.port, MemoryPort)
    layerwise.port.spoil = lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1])

    output = layerwise.run(layerwise.answer(tokens, seeded()))
    assert layerwise.port.bad, "the load failed"
    assert answers(output) == alone


def test_vllm_samples_and_keeps_books_as_the_wrapping_expects() -> None:
    sample = inspect.getsource(GPUModelRunner.sample_tokens)
    changed = f"vllm {vllm.__version__}: GPUModelRunner"
    assert [sample.count(f"self.{name}(") for name in ("_sample", "_bookkeeping_sync")] == [1, 1], changed
    assert sample.index("self._sample(") < sample.index("self._bookkeeping_sync("), changed
    bookkeeping = inspect.getsource(GPUModelRunner._bookkeeping_sync)
    assert "self.discard_request_mask.np[:num_reqs]" in bookkeeping, changed
    assert "self.input_batch.generators.get(int(i))" in bookkeeping, changed
    everything = Path(inspect.getfile(GPUModelRunner)).read_text(encoding="utf-8")
    assert everything.count("set_offset(") == 1, f"{changed} turns generators back at another place too"
    assert everything.count("self._sample(") == 1, f"{changed} samples at another place too"


def test_sampling_reads_the_very_dict_of_generators(engine: LiveEngine) -> None:
    def same() -> bool:
        batch = engine.thread.core.model_executor.driver_worker.worker.model_runner.input_batch  # type: ignore[attr-defined]
        return all(
            metadata.generators is batch.generators
            for metadata in (batch.sampling_metadata, batch._make_sampling_metadata())
        )

    assert engine.on_engine_thread(same)


def engine_with(**parts: Any) -> Any:
    class Runner:
        def _sample(self, logits: Any, spec_decode_metadata: Any) -> None: ...

        def _bookkeeping_sync(
            self, scheduler_output: Any, sampler_output: Any, logits: Any, hidden_states: Any, num_scheduled_tokens: int
        ) -> None: ...

    runner: Any = Runner()
    runner.discard_request_mask = SimpleNamespace(np=np.zeros(4, bool))
    runner.input_batch = SimpleNamespace(generators={}, req_ids=[])
    runner.requests = {}
    vars(runner).update(parts)
    return of_worker(SimpleNamespace(worker=SimpleNamespace(model_runner=runner)))


def of_worker(worker: Any) -> Any:
    """An engine whose executor has one worker."""
    return SimpleNamespace(model_executor=SimpleNamespace(collective_rpc=lambda function: [function(worker)]))


@pytest.mark.parametrize(
    "parts",
    [
        {"_bookkeeping_sync": None},
        {"_bookkeeping_sync": lambda sampler_output: None},
        {"_sample": lambda logits: None},
        {"discard_request_mask": None},
        {"input_batch": SimpleNamespace(req_ids=[])},
    ],
    ids=["missing", "bookkeeping", "sampling", "mask", "generators"],
)
def test_a_runner_made_otherwise_is_refused_at_start_in_words(parts: dict[str, Any]) -> None:
    keep_seeds_exact(engine_with())
    with pytest.raises(RuntimeError, match="a seeded prompt can end the engine"):
        keep_seeds_exact(engine_with(**parts))


def test_an_engine_without_a_runner_where_it_was_is_refused_at_start_in_words() -> None:
    with pytest.raises(RuntimeError, match=r"worker\.model_runner is missing"):
        keep_seeds_exact(of_worker(SimpleNamespace()))
