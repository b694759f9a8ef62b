"""Equal engines have equal identities, others do not; and the hashes that name KV are the engine's own."""

from __future__ import annotations

from typing import Any

import pytest
from live_engine import BLOCK, LiveEngine

from kvmanager.segments.keys import block_hashes
from load_tests.harness.engine import greedy, prompt

ENGINE: dict[str, Any] = {"device_blocks": 100}


@pytest.mark.parametrize("salt", ["a", "salt of another tenant"])
def test_keys_are_the_engines_own_block_hashes(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch, salt: str) -> None:
    seen: list[tuple[list[int], list[bytes]]] = []
    finished = engine.scheduler.connector.request_finished

    def watch(request: Any, block_ids: list[int]) -> Any:
        seen.append((list(request.all_token_ids), list(request.block_hashes)))
        return finished(request, block_ids)

    monkeypatch.setattr(engine.scheduler.connector, "request_finished", watch)
    monkeypatch.setattr(engine, "salt", salt)
    engine.run(engine.answer(prompt(300, 100), greedy(40), planned=False))

    tokens, hashes = seen[0]
    assert len(tokens) == 140
    assert hashes == block_hashes(tokens, BLOCK, salt)
