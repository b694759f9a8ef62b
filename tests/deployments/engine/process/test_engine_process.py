"""An engine in a process of its own answers, reuses, blends, aborts, dies and hangs as one on a thread does."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import re
import shutil
import signal
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from live_handle import (
    BLOCK,
    PATIENCE_S,
    SEGMENT_BLOCKS,
    LiveHandle,
    hang_while_computing,
    refused_port,
    until_gone,
    write_surroundings,
)
from vllm import envs
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from deployments.engine.crash_report import EngineDiedError
from deployments.engine.handle import EnginePrompt
from deployments.engine.process import core
from deployments.protocol.wire import GenerateRequest
from kvmanager.extensions.blend.chunks import BLEND, BlendTerms, PlannedBlend, PlannedChunk, blend_variant
from kvmanager.index.locations import Location, Tier
from kvmanager.moves.directives import Clear, DirectiveOrder, Evict
from kvmanager.moves.plan import Plan
from kvmanager.segments.keys import BLENDED, ROOT_HASH, block_hashes, cache_salt
from load_tests.faults.inside_engine import die_of, in_engine
from load_tests.harness.engine import SECRET, greedy, prompt
from load_tests.harness.patience import patience, until

TOKENS = prompt(900, 2 * SEGMENT_BLOCKS * BLOCK + 5)
CLEAR = DirectiveOrder(3, Clear(), 30.0)
DEADLY = [7, 8, 9, 7, 8]
REGEX = StructuredOutputsParams(regex="([a-z]{3} [0-9]{2};){8}")


@pytest.fixture(scope="module", autouse=True)
def _forked_engines() -> Iterator[None]:
    """Engines' processes are forked from one that has imported vLLM: each import takes eight seconds of a core.

    Leans on multiprocessing: `_stop` ends that process.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([core.__name__, "vllm.v1.worker.cpu_worker", "vllm.v1.executor.uniproc_executor"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.engine.utils.get_mp_context", lambda: forks)
        yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


class Handles:
    """One handle with an engine's process, for all tests of this file until one of them ends it: the next has another.

    The process has another hash seed and another home than this one.
    """

    def __init__(self, model: Path, home: Path) -> None:
        self._model, self._home = model, home
        self._live: LiveHandle | None = None
        self._process: Any = None

    def get(self) -> LiveHandle:
        if self._live is None:
            with pytest.MonkeyPatch.context() as patch:
                # In an empty cache vLLM would have yet another process look at the model's class.
                patch.setenv("VLLM_CACHE_ROOT", envs.VLLM_CACHE_ROOT)
                patch.setenv("HOME", str(self._home))
                patch.setenv("PYTHONHASHSEED", "123")
                self._live = LiveHandle(self._model)
            self._process = self._live.process
        return self._live

    def end(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.close()
            until_gone(self._process)


@pytest.fixture(scope="module")
def handles(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handles]:
    found = Handles(demo_model, tmp_path_factory.mktemp("home"))
    yield found
    found.end()


@pytest.fixture
def live(handles: Handles) -> LiveHandle:
    """A handle with nothing on the device."""
    handle = handles.get()
    handle.run(handle.handle.carry_out(CLEAR))
    return handle


@pytest.fixture
def mortal(handles: Handles) -> Iterator[LiveHandle]:
    """The handle, of a test that ends its engine."""
    yield handles.get()
    handles.end()


def test_with_another_hash_seed_and_home_the_process_names_model_and_blocks_as_this_one(
    live: LiveHandle, tmp_path: Path
) -> None:
    in_engine(live.handle, write_surroundings, str(tmp_path / "found"))
    identity, root, word, tiles = (tmp_path / "found").read_text().split()
    assert (identity, root) == (live.handle.fingerprint.hex(), ROOT_HASH.hex())
    assert int(word) != hash("a word"), "its hash seed is another one"
    assert tiles == str(torch.cpu._is_amx_tile_supported())


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 1.0, "seed": 7, "ignore_eos": True},
        {"temperature": 0.0, "structured_outputs": REGEX},
    ],
    ids=["greedy", "seeded", "structured"],
)
def test_an_answer_that_began_elsewhere_goes_on_there(live: LiveHandle, options: dict[str, Any]) -> None:
    def request(resumed: list[int]) -> GenerateRequest:
        params = SamplingParams(max_tokens=30, output_kind=RequestOutputKind.DELTA, **options)
        return dataclasses.replace(live.request(prompt(901, 300), params), resumed_tokens=resumed)

    async def read(resumed: list[int]) -> tuple[list[int], str]:
        outputs = [output async for output in live.handle.generate(EnginePrompt(request(resumed), None, 0.0))]
        answers = [output.outputs[0] for output in outputs]
        return [token for answer in answers for token in answer.token_ids], "".join(answer.text for answer in answers)

    tokens, text = live.run(read([]))
    refused = request([20] * 30)  # as long as it may be
    assert live.run(live.answer(refused)).outputs[0].finish_reason == "error"
    for after in (1, 13):
        live.run(live.handle.carry_out(CLEAR))
        rest, rest_text = live.run(read(tokens[:after]))
        assert rest == tokens[after:]
        assert text.endswith(rest_text)
        assert rest_text


def test_what_was_saved_there_is_loaded_there_and_changes_no_token(live: LiveHandle, tmp_path: Path) -> None:
    saved = live.count("crosskv_segments_saved_total")
    expected, cold = live.ask(TOKENS)
    until(lambda: live.count("crosskv_segments_saved_total") >= saved + 2, "the prompt is saved")
    live.run(live.handle.carry_out(CLEAR))

    answer, usage = live.ask(TOKENS, plan=live.plan(TOKENS, tmp_path))

    assert answer == expected
    assert (cold["recomputed"], cold["cpu"]) == (len(TOKENS), 0)
    assert (usage["recomputed"], usage["cpu"]) == (5, 2 * SEGMENT_BLOCKS * BLOCK)


def test_a_chunk_that_was_saved_there_is_blended_there(live: LiveHandle, tmp_path: Path) -> None:
    chunk = prompt(970, 260)
    tokens = prompt(971, 50) + chunk + prompt(972, 30)
    saved = live.count("crosskv_segments_saved_total")
    live.ask(chunk, max_tokens=1)
    until(lambda: live.count("crosskv_segments_saved_total") >= saved + 2, "the chunk is saved")
    expected, _ = live.ask(tokens)
    stored = live.plan(chunk, tmp_path)
    blend = PlannedBlend((PlannedChunk(50, stored.segments),), ratio=1.0, check_layer=2)
    plan = Plan(9, now=stored.now, epoch=stored.epoch, extras={BLEND: blend})
    salt = cache_salt(SECRET, live.handle.fingerprint, "", BLENDED, blend_variant(1.0))
    hashes: list[bytes] = list(block_hashes(tokens, 32, salt))
    request = GenerateRequest("blended", tokens, greedy(8), salt, hashes, fidelity=BLENDED)

    output = live.run(live.answer(request, plan))

    assert list(output.outputs[0].token_ids) == expected
    assert output.num_cached_tokens == (len(tokens) - 1) // 32 * 32, "what follows the chunk is taken along"
    assert live.count("crosskv_blends_total") == 1
    assert live.count("crosskv_blending_available") == 1
    assert live.handle.terms["blend"] == BlendTerms(check_layer=2, layers=6)


def test_nobody_else_can_reach_the_sockets_between_replica_and_engine(live: LiveHandle) -> None:
    paths = {Path(found.laddr) for found in psutil.Process().net_connections("unix") if "/" in str(found.laddr)}
    sockets = {path for path in paths if re.fullmatch(r"[0-9a-f-]{36}", path.name)}
    assert sockets, "vLLM's are named by a UUID"
    assert [path for path in sockets if path.exists()] == []


def test_many_at_once_answer_as_one_by_one(live: LiveHandle) -> None:
    prompts = [prompt(110 + number, 20 + 13 * number) for number in range(8)]
    alone = [live.ask(tokens)[0] for tokens in prompts]

    async def stream(tokens: list[int]) -> list[list[int]]:
        request = live.request(tokens, greedy(8, output_kind=RequestOutputKind.DELTA))
        outputs = live.handle.generate(EnginePrompt(request, None, 0.0))
        return [list(output.outputs[0].token_ids) async for output in outputs]

    async def together() -> list[list[list[int]]]:
        return await asyncio.gather(*map(stream, prompts))

    streamed = live.run(together())
    assert [[token for part in parts for token in part] for parts in streamed] == alone


def test_a_client_that_leaves_frees_its_blocks_there(live: LiveHandle) -> None:
    def blocks_in_use() -> float:
        return live.count("crosskv_device_blocks") - 1 - live.count("crosskv_device_free_blocks")

    async def leave() -> None:
        stream: Any = live.handle.generate(EnginePrompt(live.request(prompt(130, 100), greedy(2000)), None, 0.0))
        assert not (await anext(stream)).finished, "tokens are streamed"
        await stream.aclose()

    live.run(leave())
    until(lambda: blocks_in_use() == 0, "the blocks are free")
    until(lambda: live.count("vllm:num_requests_running") == 0, "vLLM has said so too")


def test_a_registration_directives_and_figures_cross_the_process(live: LiveHandle) -> None:
    live.ask(TOKENS)
    live.run(live.handle.register(3))
    assert live.run(live.handle.needs_resync()) is False
    keys: Any = tuple(live.request(TOKENS, greedy(1)).block_hashes[::-1])
    order = DirectiveOrder(1, Evict(Location(Tier.DEVICE, "replica"), keys), 30.0)
    until(lambda: live.run(live.handle.carry_out(order)).outcome == "done", "its blocks are free, and evicted")
    assert live.run(live.handle.carry_out(order)).outcome == "refused_gone"
    assert live.count("crosskv_test_waits_total") == 2, "of both ports, added"
    assert live.count("vllm:generation_tokens_total") > 0
    with pytest.raises(KeyError):
        live.run(live.handle.carry_out(DirectiveOrder(2, "no directive", 30.0)))  # type: ignore[arg-type]


def test_an_engine_that_raises_names_who_was_prefilled_and_says_why(mortal: LiveHandle) -> None:
    in_engine(mortal.handle, die_of, DEADLY)

    async def decode() -> Any:
        started = asyncio.Event()

        async def read() -> None:
            request = mortal.request(prompt(160, 40), greedy(2000), "decodes")
            async for _ in mortal.handle.generate(EnginePrompt(request, None, 0.0)):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        return task

    decoding = mortal.run(decode())
    with pytest.raises(EngineDiedError) as died:
        mortal.run(mortal.answer(mortal.request([*prompt(180, 40), *DEADLY, 1, 2], greedy(4), "poison")))

    assert died.value.suspects == ("poison",)
    with pytest.raises(EngineDiedError):
        mortal.run(asyncio.wait_for(decoding, patience(PATIENCE_S)))
    assert "this prompt ends the engine" in (mortal.handle.dead or "")
    with pytest.raises(EngineDiedError):
        mortal.run(mortal.answer(mortal.request(prompt(170, 40), greedy(4))))


def test_a_process_that_is_killed_ends_its_requests_and_blames_nobody(mortal: LiveHandle) -> None:
    running = [mortal.start(mortal.answer(mortal.request(prompt(n, 40), greedy(2000), f"r{n}"))) for n in range(2)]
    until(lambda: sum(mortal.handle._begun.values()) == 2, "both are decoding")
    mortal.process.send_signal(signal.SIGKILL)
    for request in running:
        with pytest.raises(EngineDiedError) as died:
            request.result(patience(PATIENCE_S))
        assert died.value.suspects is None, "whoever killed it may have meant no request"
    assert "-9" in (mortal.handle.dead or "")
    with pytest.raises(EngineDiedError.__base__):
        mortal.run(mortal.handle.carry_out(CLEAR))


@pytest.mark.parametrize(
    "how",
    [
        "a step that does not end",
        pytest.param(
            "a process that is stopped",
            marks=pytest.mark.long(
                "tests/deployments/engine/process/test_engine_process.py"
                "::test_an_engine_that_hangs_is_given_up_with_its_process"
            ),
        ),
    ],
)
def test_an_engine_that_hangs_is_given_up_with_its_process(
    mortal: LiveHandle, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mortal.ask(prompt(700, 40))  # so that steps have been measured
    # Of this engine's watch, from now on: a busy machine may keep the one that other tests share still for as long.
    monkeypatch.setattr(mortal.handle._watch, "standstill_s", 2.0)
    monkeypatch.setattr(mortal.handle._watch, "_slack_s", 1.0)
    process = mortal.process
    if how == "a process that is stopped":
        process.send_signal(signal.SIGSTOP)
    else:
        in_engine(mortal.handle, hang_while_computing)
    waiting = mortal.start(mortal.answer(mortal.request(prompt(701, 40), greedy(8), "waits")))
    with pytest.raises(EngineDiedError) as died:
        waiting.result(patience(PATIENCE_S))
    assert died.value.suspects == (("waits",) if how == "a step that does not end" else None)
    assert mortal.deaths == ["hung"]
    assert "EngineHungError" in (mortal.handle.dead or "")
    until_gone(process)


def test_a_port_that_cannot_be_opened_there_is_raised_here(demo_model: Path) -> None:
    with pytest.raises(ValueError, match="no cluster here"):
        LiveHandle(demo_model, open_there=refused_port)


@pytest.mark.long(
    "tests/deployments/engine/process/test_engine_process.py::test_a_port_that_cannot_be_opened_there_is_raised_here"
)
def test_weights_that_cannot_be_read_there_are_raised_here(demo_model: Path, tmp_path: Path) -> None:
    spoilt = Path(shutil.copytree(demo_model, tmp_path / "demo"))
    for weights in spoilt.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1000])  # the header is whole, which is read here
    with pytest.raises(Exception, match=r"(?i)incomplete metadata"):
        LiveHandle(spoilt)
