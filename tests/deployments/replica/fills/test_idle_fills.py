"""Chunks in idle time: one at a time, never beside a prompt, and by order; and who is blamed for what they end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from fill_world import BLOCK, CHUNK, World, asked, by_hand, key, run

from deployments.replica import chunk_fill, idle_fills
from deployments.replica.chunk_fill import LOOK_UPS, ChunkRefusedError
from deployments.replica.fill_queue import ColdChunk
from deployments.replica.fill_request import fill_request
from deployments.replica.idle_fills import MOST_TRIES


def test_in_idle_time_the_chunks_of_a_prompt_are_filled_that_is_stored_itself_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check() -> None:
        world = World("idle")
        await world.prompt(asked("a", "b", own=1))
        await world.until(lambda: len(world.computed) == 2)
        assert world.stored[b"own"] == (20 + 2 * CHUNK) // BLOCK

    run(check, monkeypatch)


def test_in_idle_time_chunks_are_filled_one_at_a_time_after_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World("idle")
        assert not await world.prompt(asked("a", "b"))
        await world.prompt(asked("b", "a"))
        await world.until(lambda: len(world.computed) == 2)
        assert world.computed == [key("a"), key("b")]
        assert world.most_running == 1
        await world.prompt(asked("a", "b"))
        await asyncio.sleep(0.05)
        assert len(world.computed) == 2

    run(check, monkeypatch)


def test_idle_time_is_used_also_when_the_manager_says_late_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World("idle")
        world.silent = LOOK_UPS - 1
        await world.prompt(asked("a", "b"))
        await world.until(lambda: len(world.computed) == 2)
        before, world.silent = len(world.asked), 2 * LOOK_UPS
        await world.prompt(asked("c", "d"))
        await world.until(lambda: len(world.asked) == before + LOOK_UPS)
        await asyncio.sleep(0.05)
        assert len(world.asked) == before + LOOK_UPS, "then it is given up"
        assert len(world.computed) == 2

    monkeypatch.setattr(chunk_fill, "LOOK_UP_PAUSE_S", 0.0)
    run(check, monkeypatch)


def test_a_prompt_interrupts_what_idle_time_is_used_for_and_it_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World("idle")
        world.goes.clear()
        await world.prompt(asked("a", "b"))
        await world.until(lambda: world.running == 1)
        world.fill.begins()
        await world.until(lambda: world.cut_off == 1)
        await asyncio.sleep(0.05)
        assert world.running == 0, "nothing is filled while a prompt is under way"
        world.fill.ends()
        world.goes.set()
        await world.until(lambda: len(world.computed) == 2)
        assert world.computed == [key("a"), key("b")]
        assert world.fill.outcomes == {"filled": 2, "failed": 0, "interrupted": 1, "dropped": 0, "refused": 0}

    run(check, monkeypatch)


def test_a_prompt_that_follows_at_once_finds_nothing_being_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        monkeypatch.setattr(idle_fills, "QUIET_S", 0.02)
        world = World("idle")
        await world.prompt(asked("a", "b"))
        await world.until(lambda: bool(world.asked))
        await asyncio.sleep(0)
        world.fill.begins()
        await asyncio.sleep(0.1)
        assert (world.running, world.computed) == (0, [])
        world.fill.ends()
        await world.until(lambda: len(world.computed) == 2)

    run(check, monkeypatch)


def test_a_chunk_that_never_comes_to_its_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World("idle")
        world.goes.clear()
        await world.prompt(asked("a", "b"))
        for tries in range(1, MOST_TRIES + 1):
            await world.until(lambda: world.running == 1)
            world.fill.begins()
            await world.until(lambda tries=tries: world.cut_off == tries)  # type: ignore[misc]
            world.fill.ends()
        world.goes.set()
        await world.until(lambda: len(world.computed) == 1)
        assert world.computed == [key("b")]
        assert world.fill.outcomes["dropped"] == 1

    run(check, monkeypatch)


def test_what_somebody_orders_is_filled_in_idle_time_whatever_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World("manual")
        world.fill.begins()
        ordered = asyncio.create_task(world.fill.by_hand(by_hand("a")))
        await asyncio.sleep(0.05)
        assert world.computed == [], "a prompt is under way"
        world.fill.ends()
        assert await ordered == "filled"
        assert await world.fill.by_hand(by_hand("a")) == "stored"
        assert world.computed == [key("a")]
        world.stores = False
        assert await world.fill.by_hand(by_hand("b")) == "not_stored"
        world.error = RuntimeError("broken in this test")
        assert await world.fill.by_hand(by_hand("c")) == "failed"
        world.error = ChunkRefusedError()
        assert await world.fill.by_hand(by_hand("d")) == "failed"
        assert world.fill.outcomes["refused"] == 1
        world.terms = {}
        assert await world.fill.by_hand(by_hand("e")) == "not_blended"

    run(check, monkeypatch)


def test_what_somebody_waits_for_is_begun_again_as_often_as_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World("manual")
        world.goes.clear()
        ordered = [asyncio.create_task(world.fill.by_hand(by_hand("a", request_id=name))) for name in "mn"]
        for tries in range(1, MOST_TRIES + 3):
            await world.until(lambda: world.running == 1)
            world.fill.begins()
            await world.until(lambda tries=tries: world.cut_off == tries)  # type: ignore[misc]
            world.fill.ends()
        world.goes.set()
        assert await asyncio.gather(*ordered) == ["filled", "filled"]
        assert world.computed == [key("a")]

    run(check, monkeypatch)


def test_who_waits_no_more_takes_the_chunk_back_and_who_has_no_room_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check() -> None:
        world = World("manual")
        world.fill.begins()
        ordered = [asyncio.create_task(world.fill.by_hand(by_hand(name))) for name in "abc"]
        await world.until(lambda: len(world.fill._idle) == 3)
        ordered[1].cancel()
        await world.until(lambda: len(world.fill._idle) == 2)
        world.fill._idle._queue._most_chunks = 2
        last = asyncio.create_task(world.fill.by_hand(by_hand("d")))
        assert await ordered[0] == "failed", "the oldest of the tenant with the most"
        world.fill.ends()
        assert [await ordered[2], await last] == ["filled", "filled"]
        assert world.computed == [key("c"), key("d")]

    run(check, monkeypatch)


def test_a_chunk_that_idle_time_was_used_for_is_blamed_by_name_and_who_ordered_it_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check() -> None:
        world = World("idle")
        world.goes.clear()
        await world.prompt(asked("a", "b"))
        await world.until(lambda: world.running == 1)
        named = [fill_request(ColdChunk([5], [key("a")], "s", "t")).request_id]
        suspects = world.fill.suspects
        assert suspects.with_prompts(named) == named
        assert suspects.blamed(named) == [key("a")]
        assert suspects.in_words(named) == f"{key('a').hex()[:16]} ({CHUNK} tokens)"
        assert (suspects.blamed([]), suspects.blamed(["x"]), suspects.blamed(None)) == ([], [], None)
        ordered = asyncio.create_task(world.fill.by_hand(by_hand("a", request_id="m")))
        await world.until(lambda: suspects.with_prompts(named) == ["m"])
        world.goes.set()
        assert await ordered == "filled"
        assert suspects.blamed(named) == []

    run(check, monkeypatch)
