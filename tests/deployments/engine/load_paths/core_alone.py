"""Runs an engine from a copy of the project without extensions, in its folder: `python core_alone.py MODEL`.

Raises where an answer with loaded KV differs from the computed one, or where nothing was loaded.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from configs.settings import load_settings
from load_tests.harness.engine import Engine, greedy, prompt
from load_tests.harness.memory_port import MemoryPort

SEGMENT = 128


async def check(engine: Engine) -> None:
    """Compute, load, and load a part; several at once in a pool that they do not fit, so that some are preempted."""
    counters = engine.reuse.transfer.counters
    prompts = [prompt(seed, 3 * SEGMENT + 40) for seed in range(6)]
    computed = [await _answer(engine, tokens) for tokens in prompts]
    await engine.empty_device()
    loaded = list(await asyncio.gather(*(_answer(engine, tokens) for tokens in prompts)))
    assert loaded == computed, "what was loaded answers otherwise"
    assert counters.segments_loaded > 0, "nothing was loaded"
    await engine.empty_device()
    engine.port.spoil = lambda sealed: None
    assert [await _answer(engine, tokens) for tokens in prompts] == computed, "what did not come answers otherwise"
    assert counters.loads_failed > 0, "no load has failed"


async def _answer(engine: Engine, tokens: list[int]) -> list[int]:
    last: Any = None
    async for output in engine.stream(tokens, greedy(48)):
        last = output
    return list(last.outputs[0].token_ids)


def main(model: str) -> None:
    """Start an engine with no path but whole loads."""
    import deployments.engine.handle

    assert Path(deployments.engine.handle.__file__).is_relative_to(Path.cwd()), "the copy is what runs"
    settings = load_settings(
        {
            "model": model,
            "dtype": "float32",
            "engine": {"device_blocks": 40, "max_num_batched_tokens": 512, "max_num_seqs": 8, "log_stats": False},
            "kv": {"segment_tokens": SEGMENT, "load_paths": [], "load_or_recompute": "load"},
        }
    )
    engine = Engine(settings, MemoryPort())
    try:
        assert list(engine.reuse.paths) == ["whole"]
        asyncio.run(check(engine))
    finally:
        engine.close()
    left = sorted(name for name in sys.modules if name.startswith("deployments.engine.load_paths."))
    print("exact, with", *(name.removeprefix("deployments.engine.load_paths.") for name in left))


if __name__ == "__main__":
    main(sys.argv[1])
