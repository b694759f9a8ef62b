"""What an operator sees of a replica's transfers and directives."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from live_engine import BLOCK, PATIENCE_S, LiveEngine, handle_of
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from deployments.engine.directive_runner import StepTimes
from deployments.engine.metrics import directive_families, transfer_families
from deployments.protocol.families import Families, labelled
from deployments.replica.replica import PinnedCall, Replica
from deployments.transfer.threads import TransferCounters
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.patience import patience


def shown(families: Iterable[Metric]) -> list[str]:
    """The lines of the Prometheus text."""
    registry = CollectorRegistry()
    registry.register(Families(families))
    return generate_latest(registry).decode().splitlines()


def test_directives_and_their_time_are_shown_by_replica() -> None:
    times = StepTimes()
    for seconds in (0.0004, 0.003):
        times.observe("promote", seconds)
    directives: Any = SimpleNamespace(
        counters=Counter({("promote", "done"): 2, ("evict", "refused_gone"): 1}), times=times
    )

    families = [*directive_families(directives), *transfer_families(TransferCounters(), {"cached_blocks": 12})]
    lines = shown(labelled(families, replica="1"))

    for expected in (
        'crosskv_directives_total{kind="promote",outcome="done",replica="1"} 2.0',
        'crosskv_directives_total{kind="evict",outcome="refused_gone",replica="1"} 1.0',
        'crosskv_directive_worst_step_seconds{kind="promote",replica="1"} 0.003',
        'crosskv_directive_step_seconds_count{kind="promote",replica="1"} 2.0',
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
        gate.wait(patience(PATIENCE_S))
        return outputs

    port = SimpleNamespace(counters=Counter(), circuits=dict, waits=SimpleNamespace(registry=CollectorRegistry()))
    made: Any = object.__new__(Replica)
    made._link, made._engine = None, handle_of(engine, port, "replica", "node", b"")
    before = engine.on_engine_thread(engine.reuse.control.usage)
    engine.on_engine_thread(lambda: setattr(core, "step_fn", long_step))
    try:
        running = engine.start(engine.answer(prompt(801, 40), greedy(2), planned=False))
        assert entered.wait(patience(PATIENCE_S))
        lines = shown(asyncio.run(asyncio.wait_for(made.metrics(PinnedCall(3)), patience(PATIENCE_S / 2))))
    finally:
        core.step_fn = step
        gate.set()
        made._engine = None
    running.result(patience(PATIENCE_S))

    assert before["cached_blocks"] == 4
    for name, value in before.items():
        assert f'crosskv_device_{name}{{replica="3"}} {float(value)}' in lines
    assert any(line.startswith('crosskv_segments_saved_total{replica="3"}') for line in lines)


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
