"""Structured-output constraints: tried where a pathological one harms nobody, before a replica compiles them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from fake_backend import FakeReplicas, backend
from ingress_server import CHAT
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from app.gate.errors import OverloadedError, UnavailableError
from app.metrics.labels import FITS, TOO_LONG
from app.openai import constraint_pool
from app.openai.constraint_pool import MOST_WAITING, ConstraintPool
from app.openai.constraint_worker import READY, GrammarVerdict
from configs.settings import PROJECT_ROOT
from load_tests.harness.patience import patience

SIMPLE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def slow(number: int) -> StructuredOutputsParams:
    """Takes minutes to compile, with whatever vocabulary."""
    return StructuredOutputsParams(
        regex="(" + "|".join(f"[a-z]{{{count + number}}}" for count in range(1, 2000)) + ")*"
    )


def of(schema: object) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def pool(vllm_config: VllmConfig, timeout_s: float, counted: list[str]) -> AsyncIterator[ConstraintPool]:
    checks = ConstraintPool(vllm_config, timeout_s, counted.append)
    try:
        yield checks
    finally:
        checks.close()


def test_constraints_are_tried_and_one_tenants_slow_ones_hold_up_no_other(vllm_config: VllmConfig) -> None:
    counted: list[str] = []

    async def scene() -> None:
        async with pool(vllm_config, patience(20.0), counted) as checks:
            await checks.check(of(SIMPLE), "alice")
            await checks.check(of(SIMPLE), "alice")
            assert counted == ["fits"], "what was tried is remembered"
            for refused in ({"type": "nonsense"}, {"$ref": "#/nowhere"}):
                with pytest.raises(VLLMValidationError):
                    await checks.check(of(refused), "alice")
            with pytest.raises(VLLMValidationError):
                await checks.check(StructuredOutputsParams(regex="(("), "alice")
            assert counted == ["fits", "refused", "refused", "refused"]
            with pytest.raises(VLLMValidationError, match="each token"):
                await checks.check(StructuredOutputsParams(regex="((a|b|[a-z])*(.*)*)*x"), "alice")
            counted.clear()

            pending = asyncio.create_task(checks.check(slow(0), "mallory"))
            await asyncio.sleep(0.2)
            for number in range(3):
                await checks.check(of({**SIMPLE, "title": str(number)}), "alice")
            assert not pending.done()
            assert counted == ["fits"] * 3
            pending.cancel()

    asyncio.run(scene())


def test_constraints_that_take_too_long_are_ended_whoever_waits_for_them(vllm_config: VllmConfig) -> None:
    counted: list[str] = []

    async def scene() -> None:
        async with pool(vllm_config, 1.0, counted) as checks:
            gone = asyncio.create_task(checks.check(slow(1), "mallory"))
            await asyncio.sleep(0.2)
            gone.cancel()
            for _ in range(2):
                with pytest.raises(VLLMValidationError, match="more than 1 s"):
                    await checks.check(slow(0), "mallory")
            assert counted == ["too_long", "too_long"], "the one that is not waited for, and one that is remembered"
            checks._timeout_s = patience(20.0)
            await checks.check(of(SIMPLE), "mallory")
            assert counted[2:] == ["fits"]

    asyncio.run(scene())


STAND_IN = """
import sys
from multiprocessing.connection import Connection
from app.metrics.labels import FITS
from app.openai.constraint_worker import READY, GrammarVerdict
pipe = Connection(int(sys.argv[1]))
pipe.recv_bytes()
pipe.send(READY)
number = 0
while True:
    pipe.recv_bytes()
    number += 1
    pipe.send(GrammarVerdict(number, FITS))
"""
"""A process that finds that everything fits, and starts at once: it does not import vLLM."""


def stand_in(pipe: Connection) -> subprocess.Popen[bytes]:
    with contextlib.closing(pipe):
        command = [sys.executable, "-c", STAND_IN, str(pipe.fileno())]
        return subprocess.Popen(command, cwd=PROJECT_ROOT, pass_fds=[pipe.fileno()])


def test_no_tenant_learns_from_a_verdict_what_another_has_sent(vllm_config: VllmConfig):
    counted: list[str] = []

    async def scene() -> None:
        checks = ConstraintPool(vllm_config, 60.0, counted.append, stand_in)
        for tenant, tried in (("alice", 1), ("alice", 1), ("bob", 2), ("", 3), ("alice", 3), ("bob", 3)):
            await checks.check(of(SIMPLE), tenant)
            assert len(counted) == tried, tenant
        checks.close()

    asyncio.run(scene())


class PlayedByHand:
    """What a pool takes for its process: the test says when it has started."""

    def __init__(self) -> None:
        self.pipes: list[Connection] = []

    def start(self, pipe: Connection) -> Any:
        self.pipes.append(pipe)
        return self

    def is_ready(self) -> None:
        self.pipes[-1].recv_bytes()
        self.pipes[-1].send(READY)

    def finds_that_it_fits(self) -> None:
        self.pipes[-1].send(GrammarVerdict(self.pipes[-1].recv().number, FITS))

    def kill(self) -> None:
        self.pipes[-1].close()

    def wait(self) -> None:
        pass


def test_a_constraint_finds_the_process_that_was_started_before(vllm_config: VllmConfig):
    async def scene() -> None:
        by_hand, counted = PlayedByHand(), list[str]()
        checks = ConstraintPool(vllm_config, patience(20.0), counted.append, by_hand.start)
        checks.start()
        checks.start()
        await asyncio.to_thread(by_hand.is_ready)
        asking = asyncio.create_task(checks.check(of(SIMPLE), "alice"))
        await asyncio.to_thread(by_hand.finds_that_it_fits)
        await asking
        assert (counted, len(by_hand.pipes)) == (["fits"], 1)
        checks.close()

    asyncio.run(scene())


def test_a_process_that_starts_slowly_goes_on_when_its_caller_has_waited_enough(vllm_config: VllmConfig, monkeypatch):
    """On a machine with one busy core it took 110 s, and each caller's 120 s began another one."""

    async def scene() -> None:
        by_hand = PlayedByHand()
        checks = ConstraintPool(vllm_config, patience(20.0), lambda _: None, by_hand.start)
        with monkeypatch.context() as short:
            short.setattr(constraint_pool, "START_TIMEOUT_S", 0.05)
            for _ in range(2):
                with pytest.raises(UnavailableError):
                    await checks.check(of(SIMPLE), "alice")
        asking = asyncio.create_task(checks.check(of(SIMPLE), "alice"))
        await asyncio.to_thread(by_hand.is_ready)
        await asyncio.to_thread(by_hand.finds_that_it_fits)
        await asking
        assert len(by_hand.pipes) == 1
        checks.close()

    asyncio.run(scene())


def test_a_process_that_never_starts_is_replaced(vllm_config: VllmConfig, monkeypatch):
    async def scene() -> None:
        by_hand = PlayedByHand()
        checks = ConstraintPool(vllm_config, patience(20.0), lambda _: None, by_hand.start)
        checks.start()
        first = checks._process
        monkeypatch.setattr(constraint_pool, "MOST_START_S", 0.0)
        checks.start()
        assert first is not None
        assert not first.alive
        await asyncio.to_thread(by_hand.is_ready)
        second = checks._process
        assert second is not None
        await asyncio.wait_for(second.ready.wait(), patience(20.0))
        checks.start()
        assert checks._process is second, "it has started, however long ago"
        assert len(by_hand.pipes) == 2
        checks.close()

    asyncio.run(scene())


def test_an_ingress_starts_it_once_a_replica_runs(fresh, monkeypatch):
    starts: list[ConstraintPool] = []
    monkeypatch.setattr(ConstraintPool, "start", lambda pool: starts.append(pool))
    heard: list[Callable[[int], None]] = []
    fresh(behind=dataclasses.replace(backend(FakeReplicas()), follow_replicas=heard.append))
    for replicas, started in ((0, 0), (1, 1)):
        for hear in heard:
            hear(replicas)
        assert len(starts) == started, replicas


def test_a_process_that_has_ended_is_replaced(vllm_config: VllmConfig):
    async def scene() -> None:
        checks = ConstraintPool(vllm_config, 60.0, lambda _: None, stand_in)
        await checks.check(of(SIMPLE), "alice")
        first = checks._process
        assert first is not None
        first._process.kill()
        await asyncio.wait_for(_ended(first), patience(60))
        await checks.check(of({**SIMPLE, "title": "replaced"}), "alice")
        assert checks._process is not first
        checks.close()

    async def _ended(process: Any) -> None:
        while process.alive:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    asyncio.run(scene())


def test_a_tenant_that_asks_too_often_is_429_and_others_are_not(vllm_config: VllmConfig, monkeypatch):
    async def scene() -> None:
        checks = ConstraintPool(vllm_config, 5.0, lambda _: None)
        never = asyncio.Event()
        monkeypatch.setattr(checks, "_try", lambda _: never.wait())
        waiting = [asyncio.create_task(checks.check(of({"title": str(i)}), "mallory")) for i in range(MOST_WAITING + 1)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await checks.check(of(SIMPLE), "mallory")
        other = asyncio.create_task(checks.check(of(SIMPLE), "alice"))
        await asyncio.sleep(0.05)
        assert not other.done(), "it is tried, not refused"
        for task in [*waiting, other, *checks._trials]:
            task.cancel()

    asyncio.run(scene())


def test_a_constraint_that_takes_too_long_is_400_and_no_replica_sees_it(start, monkeypatch):
    async def too_long(self: ConstraintPool, constraint: StructuredOutputsParams) -> GrammarVerdict:
        return GrammarVerdict(1, TOO_LONG)

    monkeypatch.setattr(ConstraintPool, "_try", too_long)
    server = start()
    with server.http() as client:
        answer = client.post("/v1/chat/completions", json={**CHAT, "structured_outputs": {"regex": "a"}})
    assert answer.status_code == 400, answer.text
    assert "5 s" in answer.json()["error"]["message"]
    assert not server.replicas.requests
