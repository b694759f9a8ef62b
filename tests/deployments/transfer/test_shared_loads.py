"""Requests that arrive together with one prefix load it once, and whatever becomes of that load, all are answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from live_engine import BLOCK, PATIENCE_S, LiveEngine, usage
from vllm import SamplingParams

from deployments.transfer.shared_loads import MOST_WAITS, SharedLoads
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.patience import patience, until

LENGTH = 500  # 15 full blocks: segments of 4, 4, 4 and 3 blocks
TOGETHER = 8


def hashes(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_who_wants_what_is_being_loaded_waits_until_the_load_ends() -> None:
    loads = SharedLoads()
    loads.begin("first", hashes("a", "b", "c", "d"), 0, 4)

    awaited = loads.awaited(hashes("a", "b", "c", "x"), 0, 4, device_tokens=0)

    assert awaited is not None
    assert awaited.upto == 3, "what comes after that is not brought by this load"
    assert not awaited.load.ended
    loads.end("first")
    assert awaited.load.ended
    assert not awaited.failed
    assert loads.awaited(hashes("a", "b", "c", "d"), 0, 4, device_tokens=0) is None


@pytest.mark.parametrize(("wanted", "waits"), [("abx", True), ("axy", False)])
def test_nobody_waits_for_a_long_load_of_which_little_is_wanted(wanted: str, waits: bool) -> None:
    loads = SharedLoads()
    loads.begin("first", hashes(*"abcd"), 0, 4)

    assert (loads.awaited(hashes(*wanted), 0, 3, device_tokens=0) is not None) is waits


def test_a_load_is_found_in_its_middle_by_who_has_its_beginning() -> None:
    loads = SharedLoads()
    loads.begin("first", hashes(*"abcdef"), 2, 6)

    awaited = loads.awaited(hashes(*"abcdefgh"), 4, 8, device_tokens=4 * BLOCK)

    assert awaited is not None
    assert awaited.upto == 6
    assert loads.awaited(hashes(*"abcdefgh"), 0, 8, device_tokens=0) is None, "the load does not bring its first block"


@pytest.mark.parametrize(("failed_at", "failed"), [(None, False), (3, True), (4, False), (0, True)])
def test_a_load_has_failed_for_those_who_want_what_did_not_come(failed_at: int | None, failed: bool) -> None:
    loads = SharedLoads()
    loads.begin("first", hashes(*"abcdef"), 0, 6)
    awaited = loads.awaited(hashes(*"abcdxy"), 0, 6, device_tokens=0)
    loads.end("first", failed_at)

    assert awaited is not None
    assert awaited.failed is failed


def test_other_names_are_other_tenants_kv_and_nobody_waits_for_them() -> None:
    loads = SharedLoads()
    loads.begin("first", hashes("tenant one's a", "tenant one's b"), 0, 2)

    assert loads.awaited(hashes("tenant two's a", "tenant two's b"), 0, 2, device_tokens=0) is None


def test_of_two_loads_of_one_block_the_end_of_one_leaves_the_other() -> None:
    loads = SharedLoads()
    loads.begin("first", hashes(*"ab"), 0, 2)
    loads.begin("second", hashes(*"ab"), 0, 2)
    loads.end("first")

    assert loads.awaited(hashes(*"ab"), 0, 2, device_tokens=0) is not None
    loads.end("second")
    loads.end("second")
    assert loads.awaited(hashes(*"ab"), 0, 2, device_tokens=0) is None


# With the real engine.


@pytest.fixture
def stored(engine: LiveEngine, request: pytest.FixtureRequest) -> tuple[list[int], list[int]]:
    """A prompt that only the port holds, a different one per test, and its answer."""
    tokens = prompt(sum(ord(letter) * (place + 7) for place, letter in enumerate(request.node.name)), LENGTH)
    answer, _ = engine.ask(tokens)
    engine.clear_device()
    return tokens, answer


class HeldFetch:
    """Fetches of a port wait until `release`."""

    def __init__(self, engine: LiveEngine) -> None:
        self._reached, self._gate = threading.Event(), threading.Event()
        self._engine = engine
        engine.port.before_fetch = self._wait

    def _wait(self) -> None:
        self._reached.set()
        assert self._gate.wait(patience(PATIENCE_S))

    def until_others_wait(self, waiting: int) -> None:
        """Return when the first load is held, and so many requests were told to ask again."""
        assert self._reached.wait(patience(PATIENCE_S))
        side = self._engine.scheduler.connector._scheduler_side
        until(
            lambda: sum(t.wait.goes_on for t in list(side._tracked.values())) == waiting, "the others wait", PATIENCE_S
        )

    def release(self) -> None:
        self._gate.set()


@pytest.fixture
def held(engine: LiveEngine, stored: tuple[list[int], list[int]]) -> Iterator[HeldFetch]:
    fetch = HeldFetch(engine)
    yield fetch
    fetch.release()


def ask_together(engine: LiveEngine, *prompts: list[int]) -> list[Future[Any]]:
    """The requests' last outputs; each is in the engine before the next one."""
    found: list[Future[Any]] = []
    for tokens in prompts:
        found.append(engine.start(engine.answer(tokens, greedy(8))))
        until(lambda: engine.on_engine_thread(engine.scheduler.get_num_unfinished_requests) == len(found), "taken")
    return found


def answers(outputs: list[Future[Any]]) -> list[list[int]]:
    return [list(output.result(patience(PATIENCE_S)).outputs[0].token_ids) for output in outputs]


def test_eight_requests_at_once_load_their_prefix_once(
    engine: LiveEngine, stored: tuple[list[int], list[int]], held: HeldFetch
) -> None:
    tokens, answer = stored
    loaded, shared = engine.transfer.counters.segments_loaded, engine.transfer.counters.loads_shared
    together = ask_together(engine, *[tokens] * TOGETHER)
    held.until_others_wait(TOGETHER - 1)
    held.release()

    assert answers(together) == [answer] * TOGETHER
    assert engine.port.fetches == 1
    assert engine.transfer.counters.segments_loaded == loaded + 4
    assert engine.transfer.counters.loads_shared == shared + TOGETHER - 1
    by_tier = [usage(output.result()) for output in together]
    assert by_tier[0] == {"device": 0, "cpu": 480, "redis": 0, "recomputed": 20}
    assert by_tier[1:] == [{"device": 480, "cpu": 0, "redis": 0, "recomputed": 20}] * (TOGETHER - 1)


def test_the_answers_to_one_prompt_load_it_once(engine: LiveEngine, stored: tuple[list[int], list[int]]) -> None:
    tokens, _ = stored
    params = SamplingParams(n=TOGETHER, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)

    async def all_answers() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        async for output in engine.stream(tokens, params):
            found.update({each.index: list(each.token_ids) for each in output.outputs})
        return found

    loaded = engine.run(all_answers())

    assert engine.port.fetches == 1
    engine.settle()
    engine.clear_device()
    engine.port.segments.clear()
    assert engine.run(all_answers()) == loaded, "computed"


def test_a_request_that_wants_more_loads_the_rest_itself(
    engine: LiveEngine, stored: tuple[list[int], list[int]], held: HeldFetch
) -> None:
    tokens, answer = stored
    half = tokens[: 9 * BLOCK]
    alone, _ = engine.ask(half, planned=False)
    engine.clear_device()
    first, second = ask_together(engine, half, tokens)
    held.until_others_wait(1)
    held.release()

    assert answers([first, second]) == [alone, answer]
    assert engine.port.fetches == 2
    assert usage(second.result()) == {"device": 9 * BLOCK, "cpu": 6 * BLOCK, "redis": 0, "recomputed": 20}


def test_a_request_that_wants_little_of_a_long_load_does_not_wait(
    engine: LiveEngine, stored: tuple[list[int], list[int]]
) -> None:
    tokens, _ = stored
    other = tokens[: 4 * BLOCK] + prompt(95, 40)
    alone, _ = engine.ask(other, planned=False)
    engine.clear_device()
    gate = threading.Event()
    engine.port.before_fetch = lambda: engine.port.fetches > 1 or gate.wait(patience(PATIENCE_S))
    first = ask_together(engine, tokens)[0]
    until(lambda: engine.port.fetches == 1, "the first load is held")

    assert answers([engine.start(engine.answer(other, greedy(8)))]) == [alone]
    assert not first.done()
    gate.set()
    first.result(patience(PATIENCE_S))


def test_when_the_first_is_aborted_another_one_loads(
    engine: LiveEngine, stored: tuple[list[int], list[int]], held: HeldFetch
) -> None:
    tokens, answer = stored
    first, *others = ask_together(engine, tokens, tokens, tokens)
    held.until_others_wait(2)
    first.cancel()
    until(lambda: engine.port.fetches == 2, "one of the others loads")
    held.until_others_wait(1)
    held.release()

    assert answers(others) == [answer, answer]
    assert engine.port.fetches == 2


@pytest.mark.parametrize("spoiled", [0, 2], ids=["nothing came", "a part came"])
def test_when_the_load_fails_the_others_compute_the_rest_and_do_not_try_again(
    engine: LiveEngine, stored: tuple[list[int], list[int]], held: HeldFetch, spoiled: int
) -> None:
    tokens, answer = stored
    fetched = 0

    def spoil(sealed: bytes) -> bytes | None:
        nonlocal fetched
        fetched += 1
        return None if fetched > spoiled else sealed

    engine.port.spoil = spoil
    together = ask_together(engine, tokens, tokens, tokens)
    held.until_others_wait(2)
    held.release()

    assert answers(together) == [answer] * 3
    assert engine.port.fetches == 1


def test_a_request_waits_for_a_few_loads_and_not_for_ever(
    engine: LiveEngine, stored: tuple[list[int], list[int]], held: HeldFetch
) -> None:
    tokens, answer = stored
    together = ask_together(engine, *[tokens] * (MOST_WAITS + 2))
    for aborted in range(MOST_WAITS):
        until(lambda at=aborted: engine.port.fetches == at + 1, "a load is held")  # type: ignore[misc]
        held.until_others_wait(len(together) - 1 - aborted)
        together[aborted].cancel()
    until(lambda: engine.port.fetches == MOST_WAITS + 2, "the two that are left have waited enough, and both load")
    held.release()

    assert answers(together[MOST_WAITS:]) == [answer, answer]


def test_what_waits_holds_up_nobody_else(
    engine: LiveEngine, stored: tuple[list[int], list[int]], held: HeldFetch
) -> None:
    tokens, answer = stored
    together = ask_together(engine, tokens, tokens)
    held.until_others_wait(1)

    other = engine.run(engine.answer(prompt(50, 200), greedy(20), planned=False))

    assert len(other.outputs[0].token_ids) == 20
    assert not any(each.done() for each in together)
    held.release()
    assert answers(together) == [answer, answer]
