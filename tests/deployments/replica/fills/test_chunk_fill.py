"""Cold chunks, computed alone: when, how often, for whom, and what becomes of the prompt that waits for them."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from fill_world import BLOCK, CHUNK, World, asked, key, run

from deployments.replica import chunk_fill
from deployments.replica.chunk_fill import ChunkFill
from deployments.replica.fill_queue import ColdChunk
from deployments.replica.fill_request import fill_request
from kvmanager.extensions.blend.chunks import BlendTerms


def test_cold_chunks_are_computed_at_once_and_stored_before_the_prompt_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check() -> None:
        world = World()
        assert await world.prompt(asked("a", "b"))
        assert sorted(world.computed) == [key("a"), key("b")]
        assert world.most_running == 2
        assert world.stored == {key("a"): CHUNK // BLOCK, key("b"): CHUNK // BLOCK}
        assert not await world.prompt(asked("b", "a"))
        assert len(world.computed) == 2
        assert world.fill.outcomes["filled"] == 2

    run(check, monkeypatch)


def test_concurrent_prompts_with_the_same_chunks_fill_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        world.goes.clear()
        prompts = [asyncio.create_task(world.prompt(asked("a", "b"))) for _ in range(3)]
        await world.until(lambda: world.running == 2 and len(world.asked) == 3)
        world.goes.set()
        assert await asyncio.gather(*prompts) == [True, True, True]
        assert len(world.computed) == 2

    run(check, monkeypatch)


def test_a_client_that_goes_away_ends_only_what_nobody_else_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        world.goes.clear()
        first = asyncio.create_task(world.prompt(asked("a", "b")))
        await world.until(lambda: world.running == 2)
        second = asyncio.create_task(world.prompt(asked("b", "c")))
        await world.until(lambda: world.running == 3)
        first.cancel()
        await world.until(lambda: world.cut_off == 1)
        assert world.running == 2
        world.goes.set()
        assert await second
        assert sorted(world.computed) == [key("b"), key("c")]

    run(check, monkeypatch)


def test_a_fill_that_fails_or_is_not_stored_in_time_lets_the_prompt_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        world.error = RuntimeError("broken in this test")
        assert await world.prompt(asked("a", "b"))
        assert world.fill.outcomes["failed"] == 2
        world.error, world.stores = None, False
        assert await world.prompt(asked("c", "d"))
        assert len(world.asked) > 10, "it was looked for more than once"
        assert not await world.prompt(asked("a", "d")), "what was in vain is not tried again soon"
        world.answers = False
        assert not await world.prompt(asked("e", "f"))
        assert sorted(world.computed) == [key("c"), key("d")]

    run(check, monkeypatch)


def test_only_prompts_that_are_worth_a_blend_are_filled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        assert not await world.prompt(asked("a"))  # 300 tokens
        world.terms = {}
        assert not await world.prompt(asked("a", "b"))
        world.terms = {"blend": BlendTerms(2, 6)}
        plain = asked("a", "b")
        plain.extras = {}
        assert not await world.prompt(plain)
        assert world.asked == []

    run(check, monkeypatch)


def test_chunks_in_the_prompts_own_stored_beginning_are_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        world.stored[b"own"] = (10 + CHUNK) // BLOCK
        assert await world.prompt(asked("a", "b", own=1))
        assert world.computed == [key("b")]
        assert await world.prompt(asked("b", "a")), "it is stored as no chunk yet, for prompts that begin otherwise"
        assert world.computed == [key("b"), key("a")]

    run(check, monkeypatch)


def test_chunks_that_are_never_stored_are_asked_for_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        world.stores, real = False, asyncio.sleep

        async def sleep(seconds: float) -> None:
            world.now += seconds
            await real(0)

        async def compute(chunk: ColdChunk) -> None:
            world.now += 5.0

        monkeypatch.setattr(chunk_fill.asyncio, "sleep", sleep)
        monkeypatch.setattr(chunk_fill, "STORED_POLL_S", 0.01)
        world.fill = ChunkFill("first", world, compute, BLOCK, clock=lambda: world.now)
        assert await world.prompt(asked("a", "b"))
        assert 5 < len(world.asked) < 30

    run(check, monkeypatch)


def test_where_blending_is_not_chosen_nothing_is_filled_first_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        assert await world.prompt(asked("a", "b"), blended=False)
        assert not await world.prompt(asked("c", "d"), blended=False)
        assert await world.prompt(asked("c", "d", tenant="another")), "no tenant ends it for others"
        world.now += chunk_fill.BACK_OFF_S
        assert await world.prompt(asked("e", "f"))

    run(check, monkeypatch)


def test_manual_filling_does_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World("manual")
        await world.prompt(asked("a", "b"))
        await asyncio.sleep(0.05)
        assert (world.asked, world.computed) == ([], [])

    run(check, monkeypatch)


def test_chunks_that_are_not_what_they_say_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        wanted = asked("a", "b", "c")
        assert "blend" in wanted.extras
        good = wanted.extras["blend"].chunks
        wanted.extras["blend"].chunks[:] = [
            good[0],
            good[0]._replace(start_token=20),
            good[1],
            good[2]._replace(block_hashes=good[2].block_hashes[:-1]),
            good[2]._replace(tokens=10_000),
        ]
        assert await world.prompt(wanted)
        assert sorted(world.computed) == [key("a"), key("b")]

    run(check, monkeypatch)


def test_outcomes_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        await world.prompt(asked("a", "b"))
        (fills, waiting) = world.fill.families()
        found = {sample.labels["outcome"]: sample.value for sample in fills.samples}
        assert fills.samples[0].name == "crosskv_chunk_fills_total"
        assert found == {"filled": 2, "failed": 0, "interrupted": 0, "dropped": 0, "refused": 0}
        assert waiting.samples[0].value == 0

    run(check, monkeypatch)


def test_a_fill_is_an_exact_request_of_the_tenant_with_the_chunks_tokens_and_one_to_sample() -> None:
    made = fill_request(ColdChunk([5, 6, 7, 8, 9], [b"h"], "exact salt", "tag"))
    assert (made.prompt_token_ids, made.block_hashes, made.cache_salt) == ([5, 6, 7, 8, 9], [b"h"], "exact salt")
    assert (made.tenant, made.fidelity, made.extras, made.sampling_params.max_tokens) == ("tag", "exact", {}, 1)
    assert made.request_id != fill_request(ColdChunk([5], [b"h"], "s", "t")).request_id


def test_prompts_that_waited_for_a_chunk_are_suspects_in_its_place_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check() -> None:
        world = World()
        world.goes.clear()
        names = {"r1": ("a", "b"), "r2": ("c", "d"), "r3": ("b", "c")}
        prompts = [
            asyncio.create_task(world.prompt(replace(asked(*chunks), request_id=name)))
            for name, chunks in names.items()
        ]
        await world.until(lambda: world.running == 4 and len(world.asked) == 3)
        made = [fill_request(ColdChunk([5], [key(name)], "s", "t")).request_id for name in "abcd"]
        named = [["x"], ["x", made[0]], [made[1]], [made[3]]]
        guilty = [["x"], ["x", "r1"], ["r1", "r3"], ["r2"]]
        prompts[1].cancel()
        assert [world.fill.suspects.with_prompts(suspects) for suspects in named] == guilty
        world.error = RuntimeError("the engine is dead")
        world.goes.set()
        await asyncio.wait(prompts)
        assert [world.fill.suspects.with_prompts(suspects) for suspects in named] == guilty, "whoever asks, and when"
        assert world.fill.suspects.with_prompts(None) is None
        world.error = None
        await world.prompt(replace(asked("e", "f"), request_id="r4"))
        done = f"{ColdChunk([5], [key('e')], 's', 't').fill_id}0"
        assert world.fill.suspects.with_prompts([done]) == [done], "what it did not end it has not ended"

    run(check, monkeypatch)
