"""Cold chunks, computed alone: when, how often, for whom, and what becomes of the prompt that waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.protocol.wire import BlendRequest, GenerateRequest, PromptChunk
from deployments.replica import chunk_fill, idle_fills
from deployments.replica.chunk_fill import ChunkFill, ChunkRefusedError
from deployments.replica.fill_queue import ColdChunk
from deployments.replica.fill_request import fill_request
from deployments.replica.idle_fills import MOST_TRIES
from kvmanager.moves.chunks import BlendTerms

BLOCK = 4
CHUNK = 300


class World:
    """A store, and an engine that computes one chunk at a time into it, as far as the test lets it."""

    def __init__(self, mode: str = "first") -> None:
        self.now = 0.0
        self.blend_terms: BlendTerms | None = BlendTerms(2, 6)
        self.stored: dict[bytes, int] = {}
        self.asked: list[list[bytes]] = []
        self.computed: list[bytes] = []
        self.running = self.most_running = self.cut_off = 0
        self.goes = asyncio.Event()
        self.goes.set()
        self.stores = self.answers = True
        self.error: Exception | None = None
        self.fill = ChunkFill(mode, self, self.compute, BLOCK, clock=lambda: self.now)

    async def stored_chunks(self, sequences: Any) -> list[int] | None:
        self.asked.append([hashes[-1] for hashes in sequences if hashes])
        self.now += 0.01
        return [self.stored.get(hashes[-1], 0) if hashes else 0 for hashes in sequences] if self.answers else None

    async def compute(self, chunk: ColdChunk) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.goes.wait()
            if self.error:
                raise self.error
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        finally:
            self.running -= 1
        self.computed.append(chunk.key)
        if self.stores:
            self.stored[chunk.key] = len(chunk.block_hashes)

    async def prompt(self, request: GenerateRequest, blended: bool = True) -> bool:
        """One prompt on its way through a replica; whether chunks were filled first."""
        self.fill.begins()
        try:
            filled = await self.fill.before(request)
            self.fill.planned(request, filled, blended)
            found = self.stored.get(request.block_hashes[-1], 0) if request.block_hashes else 0
            if request.block_hashes:  # an engine stores a prompt before it has answered
                self.stored[request.block_hashes[-1]] = len(request.prompt_token_ids) // BLOCK
            self.fill.after(request, found * BLOCK)
            return filled
        finally:
            self.fill.ends()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110 - many things may make it true
                await asyncio.sleep(0.001)


def hashes(name: str, tokens: int = CHUNK) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(tokens // BLOCK)]


def key(name: str) -> bytes:
    return hashes(name)[-1]


def asked(*names: str, tenant: str = "", own: int = 0) -> GenerateRequest:
    chunks = [PromptChunk(10 + number * CHUNK, CHUNK, hashes(name)) for number, name in enumerate(names)]
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=list(range(20 + len(names) * CHUNK)),
        sampling_params=SimpleNamespace(),  # type: ignore[arg-type]
        cache_salt="blended",
        block_hashes=[b"own"] if own else [],
        tenant=tenant,
        fidelity="blended",
        blend=BlendRequest(chunks, "exact", 0.15),
    )


def run(test: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_fills, "QUIET_S", 0.0)
    monkeypatch.setattr(chunk_fill, "STORED_POLL_S", 0.0)

    async def main() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(main())


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
        world.blend_terms = None
        assert not await world.prompt(asked("a", "b"))
        world.blend_terms = BlendTerms(2, 6)
        plain = asked("a", "b")
        plain.blend = None
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


def test_in_idle_time_the_chunks_of_a_prompt_are_filled_that_is_stored_itself_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check() -> None:
        world = World("idle")
        await world.prompt(asked("a", "b", own=1))
        await world.until(lambda: len(world.computed) == 2)
        assert world.stored[b"own"] == (20 + 2 * CHUNK) // BLOCK

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
        assert wanted.blend is not None
        good = wanted.blend.chunks
        wanted.blend.chunks[:] = [
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
    assert (made.tenant, made.fidelity, made.blend, made.sampling_params.max_tokens) == ("tag", "exact", None, 1)
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


def by_hand(name: str, tenant: str = "t", request_id: str = "m") -> GenerateRequest:
    return replace(
        asked(), request_id=request_id, prompt_token_ids=list(range(CHUNK)), block_hashes=hashes(name), tenant=tenant,
        blend=None, fidelity="exact", cache_salt="exact", fills=True,
    )  # fmt: skip


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
        world.blend_terms = None
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
