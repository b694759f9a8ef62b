"""LoRA adapters: each has KV of its own, loaded KV gives the cold answer, and other files under a name are not loaded.

Float32 engines of the demo model, one after the other, over one port in memory.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from live_engine import PATIENCE_S, LiveEngine
from lora_folders import write_adapter
from tiny_models import write_model
from vllm.model_executor.models import registry

from configs.lora_adapters import adapter_digest
from kvmanager.extensions import plan_extensions
from kvmanager.extensions.states.landings import STATES, LandingQuery
from kvmanager.moves.directives import Outcome
from kvmanager.segments.keys import AdapterName, block_hashes
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import BrainPort
from load_tests.harness.patience import patience
from tests.sizes import LONG

TOKENS = 300
ANSWER = 24 if LONG else 10
NAMES = ("first", "second")
PROMPTS = 10 if LONG else 3
"""Of each adapter, and of the model itself."""


@pytest.fixture(scope="module")
def folders(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(base / name, demo_model, seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def start(demo_model: Path, own_engine: Any) -> Any:
    def started(adapters: dict[str, Any]) -> LiveEngine:
        engine: LiveEngine = own_engine.start(
            lambda: LiveEngine(demo_model, "float32", lora_adapters=adapters), LiveEngine.close
        )
        return engine

    return started


def answer(engine: LiveEngine, tokens: list[int], planned: bool = True) -> tuple[list[int], list[float], int]:
    """The answer's tokens, their logprobs, and how many tokens of the prompt came from the port."""
    output = engine.run(engine.answer(tokens, greedy(ANSWER, logprobs=0), planned))
    engine.settle()
    chosen = output.outputs[0]
    logprobs = [one[token].logprob for one, token in zip(chosen.logprobs, chosen.token_ids, strict=True)]
    return list(chosen.token_ids), logprobs, output.kv_transfer_params["crosskv"]["cpu"]


def test_each_adapter_has_kv_of_its_own_under_the_engines_hashes_which_is_loaded(
    start: Any, folders: dict[str, Path]
) -> None:
    adapters = {name: str(folder) for name, folder in folders.items()}
    prompts = [prompt(seed, TOKENS) for seed in range(PROMPTS)]
    engine = start(adapters)
    cold = {}
    for name in (None, *NAMES):
        with engine.answered_by(name):
            for number, tokens in enumerate(prompts):
                cold[name, number] = answer(engine, tokens)
            named = AdapterName(name, adapter_digest(folders[name])) if name else None
            hashes = block_hashes(prompts[-1], 32, engine.salt, named)
            assert set(hashes) <= set(engine.on_engine_thread(engine.reuse.control.cached_hashes))
    assert all(loaded == 0 for _, _, loaded in cold.values())
    for number in range(len(prompts)):
        assert len({tuple(cold[name, number][0]) for name in (None, *NAMES)}) == 1 + len(NAMES)

    engine.clear_device()
    for (name, number), (tokens, logprobs, _) in cold.items():
        with engine.answered_by(name):
            again, close, loaded = answer(engine, prompts[number])
        assert loaded >= TOKENS - TOKENS % 32 - 32
        assert again == tokens
        assert close == pytest.approx(logprobs, abs=1e-4)

    engine.clear_device()
    with engine.answered_by("first"):
        assert engine.onboard(prompts[0]).result(patience(PATIENCE_S)).outcome is Outcome.DONE
        again = engine.ask(prompts[0], ANSWER)
        assert (again[0], again[1]["device"] > 0) == (cold["first", 0][0], True)
    with engine.answered_by("second"):
        assert engine.ask(prompts[0], ANSWER, planned=False)[1]["device"] == 0


@pytest.mark.parametrize(
    ("kind", "block"), [("gemma, window of 96", 32), ("falcon-h1", 256)], ids=["windows", "states"]
)
def test_an_adapter_of_a_model_with_windows_or_states_has_kv_of_its_own_which_is_loaded(
    kind: str, block: int, own_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM starts a process for each class that it has never seen, which imports all of vLLM again.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    model = write_model(kind, tmp_path / "model")
    adapters = {name: str(write_adapter(tmp_path / name, model, seed)) for seed, name in enumerate(NAMES)}
    options = {"lora_adapters": adapters, "block_size_tokens": block, "max_num_batched_tokens": 1536}
    engine = own_engine.start(
        lambda: LiveEngine(model, "float32", segment_tokens=4 * block, **options), LiveEngine.close
    )
    tokens, cold = prompt(1, 5 * block + 30), {}
    engine.port = engine_port(engine, block, len(tokens))
    for name in (None, *NAMES):
        with engine.answered_by(name):
            said, came = engine.ask(tokens, ANSWER)
            cold[name] = said
            assert came["recomputed"] == len(tokens)
    assert len({tuple(said) for said in cold.values()}) == 1 + len(NAMES)
    for name in (None, *NAMES):
        engine.clear_device()
        with engine.answered_by(name):
            said, came = engine.ask(tokens, ANSWER)
        assert (said, came["cpu"]) == (cold[name], 5 * block)


def engine_port(engine: LiveEngine, block: int, prompt_tokens: int) -> BrainPort:
    """A manager's brain, which plans states where the model has any."""
    port = BrainPort(4, plan_extensions([STATES]), block)
    port.prompt_tokens = prompt_tokens
    if engine.reuse.states is not None:
        port.extras = {STATES: LandingQuery()}
    return port


def test_files_that_change_while_the_server_runs_change_no_answer_and_a_fresh_engine_loads_what_others_have_stored(
    start: Any, folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = prompt(11, TOKENS)
    folder = tmp_path / "adapter"
    shutil.copytree(folders["first"], folder)
    pinned = {"path": str(folder), "sha256": adapter_digest(folder)}
    # More than fit into a step: vLLM makes room, and must find what it gave up in memory, not in the folder.
    others = {f"other-{number}": str(folders["second"]) for number in range(6)}
    engine = start({"pinned": pinned, "pointed": str(folder), **others})
    before = {}
    for name in ("pinned", "pointed", "other-0"):
        with engine.answered_by(name):
            before[name], _, _ = answer(engine, tokens)
    port = engine.port
    shutil.copytree(folders["second"], folder, dirs_exist_ok=True)
    for name in others:
        with engine.answered_by(name):
            answer(engine, prompt(12, 40))
    engine.clear_device()
    with engine.answered_by("pinned"):
        again, _, _ = answer(engine, tokens, planned=False)
    assert again == before["pinned"]

    engine = start({"pinned": pinned, "pointed": str(folder), "other-0": others["other-0"]})
    engine.port = port
    assert [adapter.name for adapter in engine.adapters] == ["other-0", "pointed"], (
        "other files than the pinned ones are not loaded"
    )
    assert "adapter pinned is not served by this replica" in caplog.text
    with engine.answered_by("pointed"):
        after, _, loaded = answer(engine, tokens)
    assert (loaded, after == before["pointed"]) == (0, False)
    with engine.answered_by("other-0"):
        after, _, loaded = answer(engine, tokens)
    assert (loaded >= TOKENS - TOKENS % 32 - 32, after) == (True, before["other-0"])
