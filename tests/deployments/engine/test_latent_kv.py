"""Latents (MLA): an engine loads what one stored, and answers bit by bit as from vLLM's own prefix cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from live_engine import DEVICE_BLOCKS, PATIENCE_S, LiveEngine
from tiny_models import CACHES_LATENTS, keep_latents, write_model
from vllm.model_executor.models import registry

from configs.settings import load_settings
from deployments.engine.wiring import why_not_moved
from deployments.transfer import segment_copy
from kernels.paged.layout import LayoutKind
from kvmanager.moves.directives import Offload, Outcome
from kvmanager.segments.format import read_header
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience
from tests.sizes import LONG

ANSWER = 24
WIDTH = 512 + 64
SEEDS_AND_BLOCKS = ((1, 20), (2, 12), (3, 9), *((seed, 5 + seed % 16) for seed in range(4, 31 if LONG else 4)))
"""Of prompts of so many whole blocks, and a token."""


class Answer(NamedTuple):
    """What an engine said, its logprobs, and of how many of the prompt's tokens the KV came from where."""

    tokens: list[int]
    logprobs: list[float]
    device: int
    cpu: int


@dataclass
class World:
    """An engine, what one answered cold and from its own prefix cache, and what it stored."""

    engine: LiveEngine
    block: int
    prompts: Sequence[list[int]]
    cold: list[Answer]
    cached: list[Answer]
    stored: dict[bytes, Any]

    def load(self, number: int, port: MemoryPort | None = None) -> Answer:
        """The answer to a prompt of which the device has nothing."""
        self.engine.port = port = port or MemoryPort()
        port.segments = dict(self.stored)
        self.engine.clear_device()
        return ask(self.engine, self.prompts[number])


def ask(engine: LiveEngine, tokens: list[int], planned: bool = True) -> Answer:
    output = engine.run(engine.answer(tokens, greedy(ANSWER, logprobs=0), planned))
    engine.settle()
    said = output.outputs[0]
    logprobs = [one[token].logprob for one, token in zip(said.logprobs, said.token_ids, strict=True)]
    came = output.kv_transfer_params["crosskv"]
    return Answer(list(said.token_ids), logprobs, came["device"], came["cpu"])


@pytest.fixture(scope="module")
def world(tmp_path_factory: Any, own_engine: Any) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        # vLLM starts a process for each class that it has never seen, which imports all of vLLM again.
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        block = keep_latents(patch)
        model = write_model("deepseek", tmp_path_factory.mktemp("model"))
        dtype = "bfloat16" if CACHES_LATENTS else "float32"
        # Without chunks, as vLLM has it on CPUs, a step computes the longest request whole.
        options = {"block_size_tokens": block, "max_num_batched_tokens": 2048}

        def started() -> LiveEngine:
            engine: LiveEngine = own_engine.start(
                lambda: LiveEngine(model, dtype, segment_tokens=4 * block, **options), LiveEngine.close
            )
            return engine

        engine = started()
        prompts = [prompt(seed, blocks * block + 1) for seed, blocks in SEEDS_AND_BLOCKS]
        cold, cached = [], []
        for tokens in prompts:
            engine.clear_device()
            cold.append(ask(engine, tokens, planned=False))
            cached.append(ask(engine, tokens, planned=False))
        stored = dict(engine.port.segments)
        if LONG:
            engine = started()
        yield World(engine, block, prompts, cold, cached, stored)


def test_an_engine_answers_bit_by_bit_as_from_vllms_own_prefix_cache(world: World) -> None:
    for number, tokens in enumerate(world.prompts):
        loaded = world.load(number)
        assert (world.cold[number].device, world.cold[number].cpu) == (0, 0)
        assert (world.cached[number].device, world.cached[number].cpu) == (len(tokens) - 1, 0)
        assert (loaded.device, loaded.cpu) == (0, len(tokens) - 1)
        assert loaded[:2] == world.cached[number][:2]


def test_a_segment_has_one_vector_a_token_and_layer_and_is_half_of_what_keys_and_values_would_be(world: World) -> None:
    copier = world.engine.reuse.copier
    layout = copier.layout
    assert (layout.kind, layout.block_size, layout.head_dim) == (LayoutKind.LATENT, world.block, WIDTH)
    assert copier.block_bytes == len(copier.layers) * world.block * WIDTH * layout.dtype.itemsize
    cache = world.engine.llm.vllm_config.cache_config
    assert cache.kv_cache_memory_bytes in (None, DEVICE_BLOCKS * copier.block_bytes)
    for span, sealed in world.stored.values():
        tokens = span.num_blocks * world.block
        assert read_header(sealed).shape == (len(copier.layers), 1, tokens, 1, WIDTH)


def test_zeroed_latents_change_the_answer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else equal answers would show nothing."""
    scatter = segment_copy.scatter

    def zeroing(layers: Sequence[torch.Tensor], ids: Any, layout: Any, values: torch.Tensor) -> None:
        scatter(layers, ids, layout, values * 0)

    monkeypatch.setattr(segment_copy, "scatter", zeroing)
    for number in range(len(world.prompts)):
        loaded = world.load(number)
        assert loaded.cpu > 0
        assert loaded.tokens != world.cached[number].tokens


def test_a_damaged_latent_is_found_and_the_prompt_is_computed(world: World) -> None:
    layers = len(world.engine.reuse.copier.layers)
    for layer in range(layers):
        port = MemoryPort()

        def spoil(sealed: bytes, layer: int = layer) -> bytes:
            start = read_header(sealed).body_offset
            at = start + (2 * layer + 1) * (len(sealed) - start) // (2 * layers)
            return sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]

        port.spoil = spoil
        loaded = world.load(0, port)
        assert port.bad
        assert (loaded.tokens, loaded.cpu) == (world.cold[0].tokens, 0)


def test_directives_bring_a_prompt_and_store_it_bit_by_bit(world: World) -> None:
    engine, tokens = world.engine, world.prompts[0]
    engine.port = port = MemoryPort()
    port.segments = dict(world.stored)
    engine.clear_device()
    assert engine.onboard(tokens).result(patience(PATIENCE_S)).outcome is Outcome.DONE
    again = ask(engine, tokens)
    assert (again.device, again[:2]) == (len(tokens) - 1, world.cached[0][:2])
    names = set(engine.hashes(tokens))
    chain = {key: (span, sealed) for key, (span, sealed) in world.stored.items() if key in names}
    engine.port = MemoryPort()  # the tier was lost
    spans = sorted((span for span, _ in chain.values()), key=lambda span: span.start_block)
    assert engine.direct(Offload(tuple(spans))).result(patience(PATIENCE_S)).outcome is Outcome.DONE
    assert engine.port.segments == chain


def test_no_tenant_finds_another_ones_latents_on_the_device_or_in_a_tier(world: World) -> None:
    own = world.load(0)
    with world.engine.acting_for("acme"):
        first = ask(world.engine, world.prompts[0])
        assert (first.device, first.cpu, first.tokens) == (0, 0, world.cold[0].tokens)
        world.engine.clear_device()
        assert ask(world.engine, world.prompts[0])[:2] == own[:2]


def test_only_paths_that_know_of_latents_load_them(world: World) -> None:
    assert set(world.engine.reuse.paths) == {"preempted", "whole"}


def test_blocks_of_another_size_than_prompts_are_named_by_are_refused_and_say_which(world: World) -> None:
    other = load_settings({"model": "models/demo", "engine": {"block_size_tokens": 128}, "kv": {"segment_tokens": 256}})
    said = why_not_moved(world.engine.thread, world.engine.llm.vllm_config, other)
    assert said == (
        f"the model has latents (MLA), which vLLM keeps in blocks of {world.block} tokens, and prompts are named in "
        f"blocks of 128: set engine.block_size_tokens to {world.block}, and kv.segment_tokens to a multiple of it"
    )


@pytest.mark.parametrize("behind", [2, 15, 16, 100])
def test_tokens_behind_loaded_latents_are_computed_as_behind_cached_ones(world: World, behind: int) -> None:
    engine, block = world.engine, world.block
    prefix = prompt(10, 8 * block)
    tokens = prefix + prompt(20 + behind, behind)
    engine.port = port = MemoryPort()
    engine.clear_device()
    ask(engine, [*prefix, 7], planned=False)
    stored = dict(port.segments)
    cached = ask(engine, tokens, planned=False)
    port.segments = stored
    engine.clear_device()
    loaded = ask(engine, tokens)
    assert (cached.device, loaded.cpu) == (len(prefix), len(prefix))
    assert loaded[:2] == cached[:2]
