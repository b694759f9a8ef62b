"""What is counted of an engine's rounds, without an engine: it is one that never forgets, or always does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from load_tests.device_order import engine as program


class Engine:
    """Answers zeros, and has what it was asked before, block by block, unless it `forgets`."""

    block_tokens = 32

    def __init__(self, forgets: bool) -> None:
        self.forgets = forgets
        self.seen: set[tuple[int, ...]] = set()

    async def stream(self, tokens: list[int], params: Any) -> Any:
        device = 0
        while tuple(tokens[: device + self.block_tokens]) in self.seen and device + self.block_tokens < len(tokens):
            device += self.block_tokens
        answer = [0] * params.max_tokens
        if not self.forgets:
            held = [*tokens, *answer[:-1]]
            self.seen |= {tuple(held[:end]) for end in range(32, len(held) + 1, 32)}
        yield SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=answer)], kv_transfer_params={program.KV_CACHE_USAGE: {"device": device}}
        )

    def wait_for_saves(self) -> None:
        """Nothing is saved."""


@pytest.mark.parametrize("forgets", [True, False])
def test_next_turns_are_found_whole_on_a_device_that_keeps_all_and_on_none_that_keeps_nothing(forgets: bool) -> None:
    engine: Any = Engine(forgets)
    found = asyncio.run(program.run(engine, 1))
    expected = 0.0 if forgets else 1.0
    assert (found["next_turn_share"], found["next_turn_token_share"]) == (expected, expected)
    assert (found["hit_share"] > 0) is not forgets


def test_the_table_has_a_row_for_each_figure() -> None:
    one = dict.fromkeys(program.FIGURES, 0.5)
    lines = program.table({"lru": [one] * 3, "hotness": [{**one, "hit_share": 0.7}] * 3}).splitlines()
    assert len(lines) == 2 + len(program.FIGURES)
    assert lines[2] == "| conversations' tokens found on the device | 0.500 | 0.700 | +0.200 to +0.200 |"
