"""The mass that goes with a saved tolerant segment is that of the model's own queries and keys, whoever is beside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import masked_reference
import numpy as np
import pytest
import torch
from live_engine import BLOCK, PATIENCE_S, LiveEngine
from masked_reference import MaskedReference
from sparse_asker import LAYERS, SEGMENT, SparseAsker

from deployments.engine.connector import layer_names
from deployments.engine.load_paths.sparse import queries
from deployments.engine.load_paths.sparse.queries import QueryWatch
from deployments.protocol.engine_hints import EngineHints
from deployments.segment_store.segment_tail import split_tail
from deployments.segment_store.sparse.segments import mass_of
from kernels.sparse.mass import SAMPLED_EVERY, attention_mass
from kvmanager.segments.head import read_header
from kvmanager.segments.keys import TOLERANT
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.patience import patience


class Seeing(MaskedReference):
    """Notes queries and keys, with their rotary phase, `(tokens, heads, head_dim)` by layer."""

    def read(self, tokens: list[int]) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.log_probabilities(tokens, 0, [[[], []]] * LAYERS)

    def mass(self, upto: int, segment: int) -> np.ndarray:
        """`(layers, kv_heads, SEGMENT)`, of a segment by its number, by what the prompt's tokens before `upto` ask."""
        positions = np.arange(SAMPLED_EVERY - 1, upto, SAMPLED_EVERY)
        first = segment * SEGMENT
        masses = [
            attention_mass(query[positions].numpy(), positions, key[first : first + SEGMENT].numpy(), first, self.scale)
            for query, key in self.seen
        ]
        return np.stack(masses).astype(np.float32)

    def _attend(self, module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        self.seen.append((query[0].transpose(0, 1), key[0].transpose(0, 1)))
        self.scale = options["scaling"]
        return super()._attend(module, query, key, value, *rest, **options)


@pytest.fixture
def watched(asker: SparseAsker) -> Iterator[SparseAsker]:
    """The engine watches the queries of tolerant prompts."""
    engine: LiveEngine = asker.engine

    def watch() -> QueryWatch:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker: Any = get_kv_transfer_group()
        runner = engine.thread.runner
        layers = runner.compilation_config.static_forward_context
        return QueryWatch(runner, [layers[name] for name in layer_names(worker.kv_caches)], BLOCK)

    asker.path.queries = engine.on_engine_thread(watch)
    yield asker
    engine.settle()
    assert not asker.path.queries._samples, "a request that has left is watched no more"
    asker.path.queries = None


def start(engine: LiveEngine, tokens: list[int], hints: EngineHints | None = None) -> Any:
    params = greedy(4)
    params.extra_args = {"kv_transfer_params": hints.as_transfer()} if hints else None
    return engine.start(engine.answer(tokens, params, planned=False))


def masses(asker: SparseAsker, tokens: list[int]) -> list[np.ndarray | None]:
    """Of the prompt's stored whole segments."""
    hashes, blocks = asker.engine.hashes(tokens), SEGMENT // BLOCK
    ends = range(blocks - 1, len(tokens) // SEGMENT * blocks, blocks)
    split = [split_tail(asker.port.segments[hashes[end]][1]) for end in ends]
    return [None if tail is None else mass_of(tail, read_header(segment).shape) for segment, tail in split]


def test_it_is_the_models_own_also_beside_others_and_in_chunks(
    watched: SparseAsker, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = watched.engine
    prompts = [prompt(61, 2 * SEGMENT + 300), prompt(62, SEGMENT + 37)]
    beside = prompt(63, SEGMENT + 90)
    started = [start(engine, each, EngineHints(fidelity=TOLERANT)) for each in prompts] + [start(engine, beside)]
    for each in started:
        each.result(patience(PATIENCE_S))
    engine.settle()
    monkeypatch.setattr(masked_reference, "ATTENTION", "crosskv_seeing")
    model = Seeing(demo_model)
    for tokens in prompts:
        model.read(tokens)
        for number, mass in enumerate(masses(watched, tokens)):
            assert mass is not None
            # A segment is saved as soon as it is computed, so its mass is by what was computed until then.
            until_then = range((number + 1) * SEGMENT, len(tokens) + SAMPLED_EVERY, SAMPLED_EVERY)
            expected = [model.mass(min(upto, len(tokens)), number) for upto in until_then]
            assert min(np.abs(mass - each).max() for each in expected) < 2e-3
            assert min(np.abs(mass - each[::-1]).max() for each in expected) > 2e-2, "it can tell"
    assert masses(watched, beside) == [None], "who is exact loses nothing"


class OnDevice:
    """A tensor whose values nobody may ask for: on a GPU that would wait for all that was ordered before."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.device = values.device

    def __len__(self) -> int:
        return len(self._values)

    def data_ptr(self) -> int:
        return self._values.data_ptr()


def test_only_steps_are_sampled_and_of_a_prompt_that_is_computed_anew_the_last_time() -> None:
    batch = SimpleNamespace(req_ids=["other", "one"], num_computed_tokens_cpu=[0, 0])
    starts = torch.zeros(8, dtype=torch.int32)
    buffer = SimpleNamespace(gpu=starts, np=starts.numpy())
    runner = SimpleNamespace(
        input_batch=batch, query_start_loc=buffer, model_config=SimpleNamespace(dtype=torch.float32)
    )
    impl = SimpleNamespace(scale=1.0, forward=lambda *args, **more: "attended")
    watch = QueryWatch(runner, [SimpleNamespace(impl=impl, num_heads=2, num_kv_heads=2, head_size=4)], BLOCK)
    sample = watch.watch("one")

    def attend(count: int, its_starts: torch.Tensor) -> list[list[int]]:
        rows = torch.arange(3 + count).view(-1, 1, 1).expand(-1, 2, 4)
        metadata = SimpleNamespace(query_start_loc=OnDevice(its_starts), seq_lens=None)
        assert impl.forward(None, rows, None, None, None, metadata) == "attended"
        return [each.positions.tolist() for each in sample.steps]

    def step(first: int, count: int) -> list[list[int]]:
        batch.num_computed_tokens_cpu[1] = first
        starts[:3] = torch.tensor([0, 3, 3 + count])
        return attend(count, starts[:3])

    assert step(0, 40) == [[15, 31]]
    assert sample.steps[0].queries[0][:, 0, 0].tolist() == [18, 34], "its rows, and nobody else's"
    batch.num_computed_tokens_cpu[1] = 40
    assert attend(40, starts[:3].clone()) == [[15, 31]], "no step, although its rows could be those of one: a blend"
    assert step(40, 24) == [[15, 31], [47, 63]]
    assert step(0, 20) == [[15]]


def test_beyond_the_room_for_samples_there_is_no_mass(watched: SparseAsker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MOST_BYTES", 10)
    tokens = prompt(64, SEGMENT + 40)
    start(watched.engine, tokens, EngineHints(fidelity=TOLERANT)).result(patience(PATIENCE_S))
    watched.engine.settle()
    assert masses(watched, tokens) == [None]
