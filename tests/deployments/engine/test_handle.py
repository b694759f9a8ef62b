"""All that crosses the engine's handle can cross a process: here every message goes through pickle."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from live_engine import BLOCK, SEGMENT_BLOCKS, LiveEngine, handle_of
from prometheus_client import CollectorRegistry
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.engine.crash_report import EngineDiedError
from deployments.engine.handle import EngineHandle, EnginePrompt
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest
from kvmanager.index.locations import Location, Tier
from kvmanager.moves.directives import Clear, DirectiveOrder, Evict
from kvmanager.moves.plan import PlanQuery
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import MemoryPort

TOKENS = prompt(900, 2 * SEGMENT_BLOCKS * BLOCK + 5)


def sent(message: Any) -> Any:
    """The message as another process has it."""
    return pickle.loads(pickle.dumps(message))


class Port:
    """What a handle asks of its port beside the connector's part, which the engine's own port in memory has."""

    def __init__(self, engine: LiveEngine) -> None:
        self._engine = engine
        self.registered: list[Any] = []
        self.counters: Counter[str] = Counter()
        self.waits = SimpleNamespace(registry=CollectorRegistry())
        self.needs_resync = False
        self.released: list[int] = []

    async def plan(self, query: PlanQuery) -> Any:
        return self._engine.port.plan(query.hashes)

    def release(self, lease_id: int) -> None:
        self.released.append(lease_id)

    def report_registration(self, arguments: Any, done: Future[None]) -> None:
        self.registered.append(arguments)
        done.set_result(None)

    def flush(self) -> None:
        pass

    def circuits(self) -> dict[tuple[str, str], str]:
        return {}


class Outside:
    """A replica in another process: sends what it says, and has what it hears, by pickle."""

    def __init__(self, handle: EngineHandle) -> None:
        self._handle = handle

    async def say(self, method: str, *arguments: Any) -> Any:
        return sent(await getattr(self._handle, method)(*sent(arguments)))

    async def answer(self, request: GenerateRequest, plan: Any) -> Any:
        message = sent(EnginePrompt(request, plan, 0.0))
        try:
            return [sent(output) async for output in self._handle.generate(message)][-1]
        except EngineDeadError as error:
            raise sent(error) from None


@pytest.fixture
def port(engine: LiveEngine) -> Port:
    engine.clear_device()
    return Port(engine)


@pytest.fixture
def outside(engine: LiveEngine, port: Port) -> Outside:
    return Outside(handle_of(engine, port, "replica", "node", b"f" * 32))


def asked(engine: LiveEngine, name: str) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=TOKENS,
        sampling_params=greedy(6),
        cache_salt=engine.salt,
        block_hashes=engine.hashes(TOKENS),
    )


def test_a_prompt_is_planned_answered_and_reused_by_messages_alone(engine: LiveEngine, outside: Outside) -> None:
    expected, _ = engine.ask(TOKENS, max_tokens=6)
    engine.clear_device()

    plan = engine.run(outside.say("plan", PlanQuery(engine.hashes(TOKENS), prompt_tokens=len(TOKENS))))
    output = engine.run(outside.answer(asked(engine, "by message"), plan))

    assert list(output.outputs[0].token_ids) == expected
    assert output.prompt_token_ids is None
    assert output.kv_transfer_params[KV_CACHE_USAGE]["cpu"] == 2 * SEGMENT_BLOCKS * BLOCK


@pytest.mark.parametrize(("save_answer", "answer_blocks"), [(True, 2), (False, 0)])
def test_an_answer_that_will_not_come_back_is_not_stored(
    engine: LiveEngine, outside: Outside, save_answer: bool, answer_blocks: int
) -> None:
    engine.port = MemoryPort()
    request = asked(engine, f"saved {save_answer}")
    request.save_answer = save_answer
    request.sampling_params = greedy(2 * BLOCK + 20)

    engine.run(outside.answer(request, None))
    engine.settle()

    prompt_blocks = len(TOKENS) // BLOCK
    stored = max(span.end_block for span, _ in engine.port.segments.values())
    assert stored == prompt_blocks + answer_blocks


def test_directives_a_registration_and_figures_are_messages(engine: LiveEngine, outside: Outside, port: Port) -> None:
    engine.ask(TOKENS)
    hashes = engine.hashes(TOKENS)
    engine.run(outside.say("register", 3))
    assert [(name, rank, node, set(held)) for name, rank, node, held, _ in port.registered] == [
        ("replica", 3, "node", set(engine.on_engine_thread(engine.reuse.control.cached_hashes)))
    ]
    keys: Any = tuple(hashes[::-1])
    order = DirectiveOrder(1, Evict(Location(Tier.DEVICE, "replica"), keys), 30.0)
    assert engine.run(outside.say("carry_out", order)).outcome == "done"
    assert engine.run(outside.say("carry_out", order)).outcome == "refused_gone"
    names = {family.name for family in engine.run(outside.say("metrics"))}
    assert {"crosskv_segments_saved", "crosskv_directives", "crosskv_device_free_blocks"} <= names
    engine.ask(TOKENS)
    assert engine.run(outside.say("carry_out", DirectiveOrder(2, Clear(), 30.0))).blocks == len(hashes)


def test_an_engine_that_died_names_its_suspects_in_another_process(engine: LiveEngine, port: Port) -> None:
    async def dying(*_: Any, **__: Any) -> Any:
        raise EngineDeadError
        yield

    handle: Any = handle_of(engine, port, "replica", "node", b"")
    handle._llm = SimpleNamespace(generate=dying, errored=True)
    handle._engine = SimpleNamespace(suspects=lambda not_begun, begun: [*not_begun, *begun], error=RuntimeError("gone"))
    with pytest.raises(EngineDiedError) as error:
        asyncio.run(
            Outside(handle).answer(asked(engine, "last"), replace(engine.port.plan(engine.hashes(TOKENS)), lease_id=7))
        )
    assert error.value.suspects == ("last",)
    assert port.released == [7], "the engine never took it"
