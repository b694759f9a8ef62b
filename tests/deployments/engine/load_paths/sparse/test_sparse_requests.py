"""Sparse requests beside all that a replica does with others: saves, directives, rooms, and who may not be sparse."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from live_engine import BLOCK, PATIENCE_S, LiveEngine
from sparse_asker import SEGMENT, SparseAsker

from deployments.engine.handle import EngineHandle, EnginePrompt
from deployments.engine.load_paths.blending.plan import RequestBlend
from deployments.protocol.engine_hints import HINTS
from deployments.protocol.wire import GenerateRequest
from deployments.replica.extensions.sparse import SparsePrefixes
from deployments.replica.plan_extension import EngineTerms
from kvmanager.extensions.sparse.retained_prefixes import SPARSE
from kvmanager.segments.keys import BLENDED, EXACT, TOLERANT, block_hashes
from kvmanager.segments.spans import split_segments
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.patience import patience

HALF = [[4, 2, 1, 0, 3, 2]] * 2


def test_nothing_is_saved_on_top_of_a_sparse_prefix(asker: SparseAsker) -> None:
    tokens = prompt(31, 2 * SEGMENT + 300)
    thinned = asker.thin(tokens, HALF)
    stored, asker.port.offered = set(asker.port.segments), []
    asker.start(tokens, thinned, 300).result(patience(PATIENCE_S))
    asker.engine.settle()
    assert set(asker.port.segments) == stored
    assert asker.port.offered == []


def test_nor_by_a_directive(asker: SparseAsker) -> None:
    engine, tokens = asker.engine, prompt(32, 2 * SEGMENT + 20)
    thinned = asker.thin(tokens, HALF)
    asker.start(tokens, thinned, 4).result(patience(PATIENCE_S))
    hashes: Any = block_hashes(tokens, BLOCK, thinned.salt(engine.salt))
    (span,) = split_segments(hashes[:8], 0, 8, 8, 8)
    begun, _, stored = engine.on_engine_thread(lambda: engine.reuse.control.offload([span]))
    assert (begun, stored) == (0, None)


def test_the_runner_is_vllms_own_until_the_first_sparse_request(asker: SparseAsker) -> None:
    engine: LiveEngine = asker.engine
    runner = engine.thread.runner
    runner.__dict__.pop("_build_attention_metadata", None)  # what a test before this one has left
    engine.ask(prompt(33, 40), planned=False)
    assert "_build_attention_metadata" not in vars(runner)
    tokens = prompt(34, 2 * SEGMENT + 20)
    asker.start(tokens, asker.thin(tokens, HALF), 4).result(patience(PATIENCE_S))
    assert "_build_attention_metadata" in vars(runner)


@pytest.mark.parametrize("why", ["exact", "blended", "unsound", "no plan", "short", "not accepted"])
def test_who_may_not_be_sparse_has_its_plain_names(
    asker: SparseAsker, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    engine, tokens = asker.engine, prompt(35, 2 * SEGMENT + 20)
    dense = engine.ask(tokens)[0]
    engine.clear_device()
    thinned = asker.thin(tokens, HALF)
    if why == "short":
        tokens = tokens[: 2 * SEGMENT]
        dense = engine.ask(tokens)[0]
        engine.clear_device()
    changes: dict[str, Any] = {"exact": {"fidelity": EXACT}, "blended": {"fidelity": BLENDED}}.get(why, {})
    if why == "unsound":
        unsound = replace(thinned.sparse, kept=((4,) * 5,) * 2)
        changes = {"plan": replace(thinned.plan, extras={SPARSE: unsound})}
    if why == "no plan":
        changes = {"plan": None}
    if why == "not accepted":
        monkeypatch.setattr(asker.path, "requests", None)

    output = asker.start(tokens, thinned, 8, **changes).result(patience(PATIENCE_S))

    assert list(output.outputs[0].token_ids) == dense
    assert asker.on_device(tokens, thinned) == 0
    assert asker.port.sparse_fetches == 0
    monkeypatch.undo()


@pytest.mark.parametrize("fidelity", [TOLERANT, BLENDED])
def test_a_request_is_sparse_or_blended_and_never_both(
    asker: SparseAsker, monkeypatch: pytest.MonkeyPatch, fidelity: Any
) -> None:
    tokens = prompt(37, 2 * SEGMENT + 20)
    thinned = asker.thin(tokens, HALF)
    path: Any = asker.engine.reuse.paths["blend"]
    blend, add, found = RequestBlend([], 0.15, 2, 0.1), asker.side.add, []

    def add_and_look(request: Any) -> None:
        add(request)
        tracked = asker.side._tracked[request.request_id]
        found.append((asker.path in tracked.state, path in tracked.state))
        tracked.state.pop(path, None)

    monkeypatch.setattr(path, "of_request", lambda *_: blend)
    monkeypatch.setattr(asker.side, "add", add_and_look)
    asker.start(tokens, thinned, 4, fidelity=fidelity).result(patience(PATIENCE_S))

    assert found == [(True, False) if fidelity == TOLERANT else (False, True)]
    monkeypatch.undo()


@pytest.mark.parametrize("fidelity", [TOLERANT, EXACT, BLENDED])
def test_a_room_names_a_prompt_by_its_sparse_prefix(asker: SparseAsker, fidelity: Any) -> None:
    tokens = prompt(36, 2 * SEGMENT + 20)
    thinned = asker.thin(tokens, HALF)
    seen: list[Any] = []

    async def generate(asked: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((asked["cache_salt"], params.extra_args["kv_transfer_params"]))
        yield SimpleNamespace(prompt_token_ids=None)

    handle: Any = EngineHandle.__new__(EngineHandle)
    handle._llm, handle._begun, handle._port = SimpleNamespace(generate=generate), {}, None
    params = greedy(4)
    params.extra_args = {"kv_transfer_params": {HINTS: {"plain_salt": "a client's"}}}
    request = GenerateRequest("name", tokens, params, "plain", [], fidelity=fidelity)

    planned = SparsePrefixes().planned(request, thinned.plan, EngineTerms(HALF, BLOCK))
    salt = planned.salt if planned is not None else None

    async def ask() -> None:
        async for _ in handle.generate(EnginePrompt(request, thinned.plan, 0.0, salt=salt)):
            pass

    asyncio.run(ask())
    ((salt, transfer),) = seen
    if fidelity == TOLERANT:
        assert (salt, transfer[HINTS].plain_salt) == (thinned.salt("plain"), "plain")
    else:
        assert salt == "plain"
        assert transfer[HINTS].plain_salt is None
