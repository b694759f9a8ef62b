"""What an operator sees of a replica's transfers and directives."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from live_engine import BLOCK, PATIENCE_S, LiveEngine
from prometheus_client import CollectorRegistry

from deployments.engine.step_times import StepTimes
from deployments.replica.metrics import replica_metrics_text
from deployments.replica.replica import PinnedCall, Replica
from deployments.transfer.threads import TransferCounters
from load_tests.harness.engine import greedy, prompt


def test_directives_and_their_time_are_shown_by_replica() -> None:
    times = StepTimes()
    for seconds in (0.0004, 0.003):
        times.observe("promote", seconds)
    device: Any = SimpleNamespace(counters=Counter({("promote", "done"): 2, ("evict", "refused_gone"): 1}), times=times)
    port: Any = SimpleNamespace(counters=Counter(), circuits=dict, waits=SimpleNamespace(registry=CollectorRegistry()))
    transfer: Any = SimpleNamespace(counters=TransferCounters())

    lines = replica_metrics_text("1", port, transfer, {"cached_blocks": 12}, device).splitlines()

    for expected in (
        'crosskv_directives_total{kind="promote",outcome="done",replica="1"} 2.0',
        'crosskv_directives_total{kind="evict",outcome="refused_gone",replica="1"} 1.0',
        'crosskv_directive_worst_step_seconds{kind="promote",replica="1"} 0.003',
        'crosskv_directive_step_seconds_count{replica="1",kind="promote"} 2.0',
        'crosskv_device_cached_blocks{replica="1"} 12.0',
    ):
        assert expected in lines, "\n".join(line for line in lines if line.startswith("crosskv_"))


def test_metrics_are_complete_while_the_engine_is_in_a_step_and_as_of_the_last_one(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replica, "rank", 3)  # outside Serve there is none
    engine.ask(prompt(800, 4 * BLOCK))
    core = engine.thread.core
    entered, gate, step = threading.Event(), threading.Event(), core.step_fn

    def long_step() -> Any:
        outputs = step()
        entered.set()
        gate.wait(PATIENCE_S)
        return outputs

    made: Any = object.__new__(Replica)
    made._reuse, made._device = engine.reuse, engine.orders
    made._orders = made._watch = made._llm = None
    made._port = SimpleNamespace(
        counters=Counter(), circuits=dict, waits=SimpleNamespace(registry=CollectorRegistry()), close=lambda: None
    )
    before = engine.reuse.pool_usage().result(PATIENCE_S)
    engine.on_engine_thread(lambda: setattr(core, "step_fn", long_step))
    try:
        running = engine.start(engine.answer(prompt(801, 40), greedy(2), planned=False))
        assert entered.wait(PATIENCE_S)
        text = asyncio.run(asyncio.wait_for(made.metrics(PinnedCall(3)), PATIENCE_S / 2))
    finally:
        core.step_fn = step
        gate.set()
        made._device = made._reuse = made._port = None
        made._llm = SimpleNamespace(shutdown=lambda: None)
    running.result(PATIENCE_S)

    assert before["cached_blocks"] == 4
    for name, value in before.items():
        assert f'crosskv_device_{name}{{replica="3"}} {float(value)}' in text.splitlines()
    assert 'crosskv_segments_saved_total{replica="3"}' in text


def test_what_a_pool_holds_is_counted_without_a_walk_over_its_blocks(engine: LiveEngine) -> None:
    engine.ask(prompt(802, 4 * BLOCK))

    def walked() -> int:
        return len({block.block_hash for block in engine.reuse.control._cached_blocks()})

    def usage_of_a_pool_that_cannot_be_walked() -> dict[str, int]:
        pool: Any = engine.reuse.control._pool
        pool.blocks, blocks = range(len(pool.blocks)), pool.blocks
        try:
            return engine.reuse.control.usage()
        finally:
            pool.blocks = blocks

    assert engine.on_engine_thread(usage_of_a_pool_that_cannot_be_walked)["cached_blocks"] == 4
    assert engine.on_engine_thread(walked) == 4
