"""What no load would be worth is not saved, unless it becomes the beginning of something longer."""

from __future__ import annotations

from typing import Any

import pytest
from live_engine import BLOCK, LiveEngine

from deployments.protocol.engine_hints import EngineHints
from kvmanager.loading.short_prompts import UNMEASURED_BLOCKS
from load_tests.harness.engine import greedy, prompt

LEAST = UNMEASURED_BLOCKS * BLOCK


def saved_tokens(engine: LiveEngine) -> int:
    return BLOCK * sum(span.num_blocks for span, _ in engine.port.segments.values())


def ask(engine: LiveEngine, tokens: list[int], short_tokens: int) -> Any:
    """With what the manager has said of short prompts."""

    async def answer() -> Any:
        hints = EngineHints(engine.port.plan(engine.hashes(tokens)), short_tokens=short_tokens)
        return [output async for output in engine.generate(tokens, greedy(4), hints)][-1]

    output = engine.run(answer())
    engine.settle()
    return output


def test_a_short_prompt_is_not_offered_and_counted(engine: LiveEngine) -> None:
    before = engine.transfer.counters.saves_short
    engine.ask(prompt(1001, LEAST - 20), max_tokens=4)

    assert engine.port.segments == {}
    assert engine.port.offered == []
    assert engine.transfer.counters.saves_short == before + 1


def test_a_prompt_shorter_than_a_block_has_nothing_to_save(engine: LiveEngine) -> None:
    before = engine.transfer.counters.saves_short
    engine.ask(prompt(1002, BLOCK - 10), max_tokens=4)
    assert engine.transfer.counters.saves_short == before


def test_with_its_answer_a_short_prompt_may_be_worth_it(engine: LiveEngine) -> None:
    engine.ask(prompt(1003, LEAST - 20), max_tokens=60)
    assert saved_tokens(engine) == LEAST + BLOCK


def test_a_conversation_that_began_short_is_loaded_from_its_beginning(engine: LiveEngine) -> None:
    question = prompt(1004, LEAST - 40)
    answer, _ = engine.ask(question, max_tokens=10)
    assert engine.port.segments == {}
    turn = question + answer + prompt(1005, 60)
    again, _ = engine.ask(turn)
    engine.clear_device()

    loaded, by_tier = engine.ask(turn)

    assert loaded == again
    assert by_tier["cpu"] == LEAST, "all full blocks of 158 tokens, the first turn's too"


def test_a_short_system_prompt_is_saved_when_it_comes_again_and_not_the_rest(engine: LiveEngine) -> None:
    system = prompt(1006, 2 * BLOCK)
    first, second, third = (system + prompt(seed, BLOCK + 5) for seed in (61, 62, 63))
    engine.ask(first, max_tokens=2)
    assert engine.port.segments == {}
    engine.ask(second, max_tokens=2)
    assert saved_tokens(engine) == 2 * BLOCK
    offers = len(engine.port.offered)
    engine.clear_device()

    _, by_tier = engine.ask(third, max_tokens=2)

    assert by_tier["cpu"] == 2 * BLOCK
    assert len(engine.port.offered) == offers, "it is not offered with every prompt"


@pytest.mark.parametrize(("short_tokens", "saved"), [(1, 3 * BLOCK), (4 * BLOCK, 0)])
def test_the_measured_break_even_says_what_is_short(engine: LiveEngine, short_tokens: int, saved: int) -> None:
    ask(engine, prompt(1007 + short_tokens, 3 * BLOCK + 5), short_tokens)
    assert saved_tokens(engine) == saved


def test_what_is_worth_a_load_is_saved_whole_however_much_is_short(engine: LiveEngine) -> None:
    ask(engine, prompt(1009, 6 * BLOCK + 5), 5 * BLOCK)
    assert saved_tokens(engine) == 6 * BLOCK
