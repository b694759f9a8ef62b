"""What no load would be worth is not saved, unless it becomes the beginning of something longer."""

from __future__ import annotations

import pytest
from live_engine import BLOCK, LiveEngine

from kvmanager.loading.short_prompts import UNMEASURED_BLOCKS
from load_tests.harness.engine import prompt

LEAST = UNMEASURED_BLOCKS * BLOCK


def saved_tokens(engine: LiveEngine) -> int:
    return BLOCK * sum(span.num_blocks for span, _ in engine.port.segments.values())


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
    assert saved_tokens(engine) == LEAST


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
    with engine.measured(short_tokens):
        engine.ask(prompt(1007 + short_tokens, 3 * BLOCK + 5))
    assert saved_tokens(engine) == saved


def test_what_is_worth_a_load_is_saved_whole_however_much_is_short(engine: LiveEngine) -> None:
    with engine.measured(5 * BLOCK):
        engine.ask(prompt(1009, 6 * BLOCK + 5))
    assert saved_tokens(engine) == 6 * BLOCK


def test_the_short_end_of_a_prompt_whose_rest_is_stored_is_not_offered_and_counted(engine: LiveEngine) -> None:
    document = prompt(1010, 6 * BLOCK)
    engine.ask(document, max_tokens=2)
    before, offers = engine.transfer.counters.saves_short, len(engine.port.offered)

    engine.ask(document + prompt(1011, 2 * BLOCK), max_tokens=2)

    assert saved_tokens(engine) == 6 * BLOCK
    assert len(engine.port.offered) == offers
    assert engine.transfer.counters.saves_short == before + 1


def test_such_an_end_is_saved_when_it_comes_again(engine: LiveEngine) -> None:
    document, end = prompt(1012, 6 * BLOCK), prompt(1013, 2 * BLOCK)
    for tokens in (document, document + end, document + end + prompt(1014, BLOCK)):
        engine.ask(tokens, max_tokens=2)
    assert saved_tokens(engine) == 8 * BLOCK


def test_a_conversation_is_saved_on_from_where_storage_ends_once_enough_is_new(engine: LiveEngine) -> None:
    turn = prompt(1015, 6 * BLOCK)
    stored = []
    for seed in range(1016, 1020):
        engine.ask(turn, max_tokens=2)
        stored.append(saved_tokens(engine) // BLOCK)
        turn += prompt(seed, 2 * BLOCK)

    # The third turn brings the second one's end again, and four new blocks follow what is stored.
    assert stored == [6, 6, 10, 10]
    engine.clear_device()
    _, by_tier = engine.ask(turn, max_tokens=2)
    assert by_tier["cpu"] == 10 * BLOCK
