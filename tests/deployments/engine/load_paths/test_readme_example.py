"""The example of "add a load path" is a load path: it brings what it says, and survives a load that fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from live_engine import BLOCK, SEGMENT_BLOCKS, LiveEngine, usage

from configs.settings import PROJECT_ROOT
from deployments.engine.load_paths.parts import EngineParts
from deployments.protocol.engine_hints import EngineHints
from load_tests.harness.engine import greedy, prompt

README = PROJECT_ROOT / "deployments" / "engine" / "load_paths" / "README.md"
SEGMENT = SEGMENT_BLOCKS * BLOCK


@pytest.fixture
def with_example(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveEngine]:
    """The engine with the README's path before all others."""
    (source,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(source.splitlines()) <= 50, "an example is short"
    module: dict[str, Any] = {"__name__": "head"}
    exec(compile(source, str(README), "exec"), module)
    reuse = engine.reuse
    parts = object.__new__(EngineParts)
    object.__setattr__(parts, "whole", reuse.paths["whole"])
    object.__setattr__(parts, "transfer", reuse.transfer)
    side: Any = reuse._scheduler_side
    monkeypatch.setattr(side, "_paths", (module["build"](parts), *side._paths))
    yield engine
    monkeypatch.undo()


def ask(engine: LiveEngine, tokens: list[int], **extras: bool) -> tuple[list[int], dict[str, int]]:
    plan = replace(engine.port.plan(engine.hashes(tokens)), extras=extras)

    async def answer() -> Any:
        return [output async for output in engine.generate(tokens, greedy(8), EngineHints(plan))][-1]

    output = engine.run(answer())
    engine.settle()
    return list(output.outputs[0].token_ids), usage(output)


def test_the_example_brings_one_segment_of_a_prompt_that_asks_for_it(with_example: LiveEngine) -> None:
    engine, tokens = with_example, prompt(71, 3 * SEGMENT + 10)
    computed, _ = ask(engine, tokens)
    engine.clear_device()
    assert ask(engine, tokens, head_only=True) == (
        computed,
        {"device": 0, "cpu": SEGMENT, "redis": 0, "recomputed": 2 * SEGMENT + 10},
    )
    engine.clear_device()
    found, sources = ask(engine, tokens)
    assert (found, sources["cpu"]) == (computed, 3 * SEGMENT), "other prompts bring all"


def test_a_segment_that_does_not_come_is_computed(with_example: LiveEngine) -> None:
    engine, tokens = with_example, prompt(72, 3 * SEGMENT + 10)
    computed, _ = ask(engine, tokens)
    engine.clear_device()
    fetches, engine.port.spoil = engine.port.fetches, lambda sealed: None
    found, sources = ask(engine, tokens, head_only=True)
    assert (found, sources["cpu"]) == (computed, 0)
    assert engine.port.fetches == fetches + 1, "and asked for once"
