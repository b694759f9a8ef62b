"""Plain vLLM in this process, with a record of every step: how many tokens, how long, how much KV was held."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import RequestOutputKind

from configs.settings import load_settings
from load_tests.experiments.sizes import DEVICE_BLOCKS, MOST_SEQUENCES, STEP_TOKENS, WIDEST_STEP_TOKENS
from load_tests.harness.engine import Engine, greedy, prompt

SEEDS = itertools.count(1)


class PlainEngine:
    """The host of a plain `EngineSpec`. Its methods are called one after the other."""

    def __init__(self, folder: str, dtype: str) -> None:
        engine = {
            "device_blocks": DEVICE_BLOCKS,
            "max_num_seqs": MOST_SEQUENCES,
            "max_num_batched_tokens": WIDEST_STEP_TOKENS,
        }
        self._engine = Engine(
            load_settings({"model": folder, "dtype": dtype, "engine": engine, "kv": {"enabled": False}})
        )
        self._llm, self._thread = self._engine.llm, self._engine.thread
        core: Any = self._thread.core
        self._core = core
        self._pool = core.scheduler.kv_cache_manager.block_pool
        self._steps: list[tuple[int, int, float, int]] = []
        self._scheduled = (0, 0, 0)
        self._kept_back = 0
        self._runner = asyncio.Runner()
        self._thread.call(self._record_steps).result()
        self.run([64, 64], 2)  # the first requests are slow: parts of vLLM load with them

    def run(
        self,
        prompts: Sequence[int],
        max_tokens: int,
        step_tokens: int = STEP_TOKENS,
        pool_blocks: int | None = None,
    ) -> dict[str, Any]:
        """New prompts of these lengths, in one batch; each answer has exactly `max_tokens` tokens.

        `pool_blocks`: the rest of the device pool is kept back meanwhile. Answers `requests`: for each the seconds
        after which its tokens were there; `steps`: tokens, requests, seconds and KV blocks held, of each.
        """
        self._core.scheduler.max_num_scheduled_tokens = step_tokens
        free = self._pool.get_num_free_blocks()
        kept_back = self._thread.call(lambda: self._pool.get_new_blocks(free - (pool_blocks or free))).result()
        self._kept_back = len(kept_back)
        self._steps.clear()
        try:
            times = self._runner.run(self._run([prompt(next(SEEDS), tokens) for tokens in prompts], max_tokens))
        finally:
            self._thread.call(lambda: self._pool.free_blocks(kept_back)).result()
        return {"requests": times, "steps": list(self._steps)}

    def kv_bytes_per_block(self) -> int:
        """Bytes of one block in the KV tensors of all layers."""
        runner: Any = self._core.model_executor.driver_worker.worker.model_runner
        return sum(int(layer.nbytes) for layer in runner.kv_caches) // int(self._pool.num_gpu_blocks)

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    async def _run(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[float]]:
        await self._llm.get_supported_tasks()  # asks the engine the first time, which is about to wait
        begun = threading.Event()
        self._thread.call(begun.wait)  # nothing is computed until all have been handed over: they share the first step
        began = 0.0

        async def read(tokens: list[int]) -> list[float]:
            times: list[float] = []
            async for output in self._engine.stream(tokens, greedy(max_tokens, output_kind=RequestOutputKind.DELTA)):
                times += [time.perf_counter() - began] * len(output.outputs[0].token_ids)
            return times

        reads = [asyncio.ensure_future(read(tokens)) for tokens in prompts]
        try:
            while self._llm.output_processor.get_num_unfinished_requests() < len(prompts):
                await asyncio.sleep(0.001)
                for done in filter(asyncio.Future.done, reads):
                    done.result()  # raises: a prompt that was refused
            began = time.perf_counter()
        finally:
            begun.set()
        return list(await asyncio.gather(*reads))

    def _record_steps(self) -> None:
        """On the engine thread."""
        scheduler, step, schedule = self._core.scheduler, self._core.step_fn, self._core.scheduler.schedule

        def recorded_schedule(*args: Any, **named: Any) -> Any:
            found = schedule(*args, **named)
            held = self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks() - self._kept_back
            self._scheduled = (found.total_num_scheduled_tokens, len(found.num_scheduled_tokens), held)
            return found

        def recorded_step() -> Any:
            began = time.perf_counter()
            found = step()
            seconds = time.perf_counter() - began
            tokens, requests, held = self._scheduled
            if tokens:
                self._steps.append((tokens, requests, seconds, held))
            return found

        scheduler.schedule = recorded_schedule
        self._core.step_fn = recorded_step
