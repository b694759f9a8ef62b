"""Missing chunks, computed alone: when, how often, for whom, and what becomes of the prompt that waits for them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from precompute_world import BLOCK, CHUNK, World, asked, chunk, key, run

from app.extensions.blend.precompute import precompute, turns
from app.extensions.blend.precompute.chunks import MissingChunk
from app.extensions.blend.precompute.precompute import LOOK_UP_PAUSES_S, MOST_TRIES, UNANSWERED_S, why_off
from app.gate.errors import PoisonPromptError, RefusedPromptError
from configs.secret.api_keys import FARTHEST_PRIORITY
from configs.settings import load_settings
from deployments.engine.crash_report import EngineDiedError
from deployments.protocol.wire import NOT_READ, GenerateRequest


def test_missing_chunks_are_computed_and_stored_before_the_prompt_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World(replicas=2)
        world.goes.clear()
        prompt = asyncio.create_task(world.prompt(asked("a", "b", "c")))
        await world.until(lambda: world.running == 2)
        world.goes.set()
        await prompt
        assert sorted(world.computed) == [key("a"), key("b"), key("c")]
        assert world.most_running == 2, "one for each replica"
        assert world.stored == dict.fromkeys(map(key, "abc"), CHUNK // BLOCK)
        await world.prompt(asked("b", "a", "c"))
        assert len(world.computed) == 3
        assert world.outcomes() == {"filled": 3}

    run(check, monkeypatch)


def test_concurrent_prompts_with_the_same_chunks_compute_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World(replicas=2)
        world.goes.clear()
        prompts = [asyncio.create_task(world.prompt(asked("a", "b"))) for _ in range(3)]
        await world.until(lambda: world.running == 2 and len(world.asked) == 3)
        world.goes.set()
        await asyncio.gather(*prompts)
        assert len(world.computed) == 2

    run(check, monkeypatch)


def test_a_client_that_goes_away_ends_only_what_no_other_prompt_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World(replicas=3)
        world.goes.clear()
        first = asyncio.create_task(world.prompt(asked("a", "b")))
        await world.until(lambda: world.running == 2)
        second = asyncio.create_task(world.prompt(asked("b", "c")))
        await world.until(lambda: world.running == 3)
        first.cancel()
        await world.until(lambda: world.cut_off == 1)
        assert world.running == 2
        world.goes.set()
        await second
        assert sorted(world.computed) == [key("b"), key("c")]

    run(check, monkeypatch)


def test_a_chunk_that_fails_or_is_not_stored_in_time_lets_the_prompt_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        world.error = lambda request: RuntimeError("broken in this test")
        await world.prompt(asked("a", "b"))
        assert world.outcomes() == {"failed": 2}
        world.error, world.stores = (lambda request: None), False
        await world.prompt(asked("c", "d"))
        assert 5 < len(world.asked) < 100, "it was looked for more than once"
        await world.prompt(asked("a", "d"))
        assert sorted(world.computed) == [key("c"), key("d")], "what was in vain is not tried again soon"

    run(check, monkeypatch)


def test_a_manager_that_does_not_answer_holds_up_one_prompt_and_then_none_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check() -> None:
        world = World()
        world.answers = False
        await world.precompute.before(asked("a", "b"), "")
        await world.precompute.before(asked("a", "b"), "")
        assert len(world.asked) == 1
        world.answers = True
        world.now += UNANSWERED_S
        await world.precompute.before(asked("a", "b"), "")
        assert len(world.computed) == 2

    run(check, monkeypatch)


def test_only_prompts_that_are_worth_a_blend_are_computed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        await world.prompt(asked("a"))  # 300 tokens
        await world.prompt(asked())
        assert world.asked == []

    run(check, monkeypatch)


def test_chunks_in_the_prompts_own_stored_beginning_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        world.stored[b"own"] = (10 + CHUNK) // BLOCK
        await world.prompt(asked("a", "b", own=1))
        assert world.computed == [key("b")]
        await world.prompt(asked("b", "a"))
        assert world.computed == [key("b"), key("a")], "it was stored as no chunk yet"

    run(check, monkeypatch)


def test_where_blending_is_not_chosen_nothing_is_computed_first_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World(tenants=("one", "other"))
        await world.prompt(asked("a", "b"), "one", blended=False)
        await world.precompute.before(asked("c", "d"), "one")
        assert len(world.computed) == 2
        await world.precompute.before(asked("c", "d"), "other")
        assert len(world.computed) == 4, "no tenant ends it for others"
        world.now += precompute.BACK_OFF_S
        await world.precompute.before(asked("e", "f"), "one")
        assert len(world.computed) == 6

    run(check, monkeypatch)


def test_manual_computes_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World("manual")
        await world.prompt(asked("a", "b"))
        await asyncio.sleep(0.05)
        assert (world.asked, world.computed) == ([], [])

    run(check, monkeypatch)


def test_a_chunk_that_ends_an_engine_ends_no_second_one_and_its_prompts_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check() -> None:
        world = World()
        world.error = lambda request: EngineDiedError([request.request_id]) if _has(request, "a") else None
        with pytest.raises(PoisonPromptError):
            await world.prompt(asked("a", "b"))
        assert len([request for request in world.replicas.requests if _has(request, "a")]) == 1
        world.now += precompute.KNOWN_S
        with pytest.raises(RefusedPromptError):
            await world.prompt(asked("c", "a"))
        assert await world.precompute.order(chunk("a"), "") == "refused"
        assert len([request for request in world.replicas.requests if _has(request, "a")]) == 1
        assert world.outcomes()["refused"] == 3

    run(check, monkeypatch)


def _has(request: GenerateRequest, name: str) -> bool:
    return request.block_hashes[-1] == key(name)


def test_in_idle_time_the_chunks_of_a_prompt_are_computed_that_is_stored_itself_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check() -> None:
        world = World("idle")
        await world.prompt(asked("a", "b", own=1))
        await world.filled(2)
        assert world.stored[b"own"] == (20 + 2 * CHUNK) // BLOCK
        assert world.most_running == 1
        await world.prompt(asked("a", "b"))
        await asyncio.sleep(0.05)
        assert len(world.computed) == 2

    run(check, monkeypatch)


def test_a_prompt_that_failed_brings_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World("idle")
        world.begin(asked("a", "b")).end("UnavailableError")
        await asyncio.sleep(0.05)
        assert (world.asked, world.computed) == ([], [])

    run(check, monkeypatch)


def test_idle_time_is_used_also_when_the_manager_says_late_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        questions = 1 + len(LOOK_UP_PAUSES_S)
        world = World("idle")
        world.silent = questions - 1
        await world.prompt(asked("a", "b"))
        await world.filled(2)
        before, world.silent = len(world.asked), 2 * questions
        await world.prompt(asked("c", "d"))
        await world.until(lambda: len(world.asked) == before + questions)
        await asyncio.sleep(0.05)
        assert len(world.asked) == before + questions, "then it is given up"
        assert len(world.computed) == 2

    run(check, monkeypatch)


def test_a_prompt_interrupts_what_idle_time_is_used_for_and_it_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World("idle")
        world.goes.clear()
        await world.prompt(asked("a", "b"))
        await world.until(lambda: world.running == 1)
        ear = world.begin(asked())
        await world.until(lambda: world.cut_off == 1)
        await asyncio.sleep(0.05)
        assert world.running == 0, "nothing is computed while a prompt is under way"
        ear.end("")
        world.goes.set()
        await world.until(lambda: world.outcomes() == {"filled": 2, "interrupted": 1})
        assert world.computed == [key("a"), key("b")]

    run(check, monkeypatch)


def test_a_chunk_that_never_comes_to_its_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World("idle")
        world.goes.clear()
        await world.prompt(asked("a", "b"))
        for tries in range(1, MOST_TRIES + 1):
            await world.until(lambda: world.running == 1)
            ear = world.begin(asked())
            await world.until(lambda tries=tries: world.cut_off == tries)  # type: ignore[misc]
            ear.end("")
        world.goes.set()
        await world.filled(1)
        assert world.computed == [key("b")]
        assert world.outcomes() == {"filled": 1, "dropped": 1, "interrupted": MOST_TRIES}

    run(check, monkeypatch)


def test_what_waits_for_idle_time_is_bounded_and_no_tenant_takes_anothers_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompute, "MOST_TOKENS", 8 * CHUNK)

    async def check() -> None:
        world = World("idle", tenants=("loops", "other"))
        stays = world.begin(asked())
        for number in range(10):
            await world.prompt(asked(f"x{number}", f"y{number}"), "loops")
        assert world.outcomes() == {"dropped": 14}
        await world.prompt(asked("a", "b"), "other")
        assert world.outcomes() == {"dropped": 14}
        await world.until(lambda: [key("a"), key("b")] in world.asked)
        stays.end("")
        await world.filled(8)
        assert world.computed[1] == key("a"), "tenants take turns"
        assert key("b") in world.computed[:5]
        await world.prompt(asked("c", "d"), "loops")
        await world.filled(10)

    run(check, monkeypatch)


@pytest.mark.parametrize("mode", ["idle", "first", "manual"])
def test_an_order_is_carried_out_in_idle_time_whatever_the_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World(mode)
        ear = world.begin(asked())
        order = asyncio.create_task(world.precompute.order(chunk("a"), ""))
        await world.until(lambda: bool(world.asked))
        await asyncio.sleep(0.05)
        assert world.running == 0
        ear.end("")
        assert await order == "filled"
        assert await world.precompute.order(chunk("a"), "") == "stored"
        world.stores = False
        assert await world.precompute.order(chunk("b"), "") == "not_stored"

    run(check, monkeypatch)


def test_an_order_goes_on_after_any_number_of_prompts_and_ends_with_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        world.goes.clear()
        order = asyncio.create_task(world.precompute.order(chunk("a"), ""))
        for tries in range(1, MOST_TRIES + 3):
            await world.until(lambda: world.running == 1)
            ear = world.begin(asked())
            await world.until(lambda tries=tries: world.cut_off == tries)  # type: ignore[misc]
            ear.end("")
        await world.until(lambda: world.running == 1)
        order.cancel()
        await world.until(lambda: world.running == 0)
        world.goes.set()
        assert await world.precompute.order(chunk("b"), "") == "filled", "its place is free"

    run(check, monkeypatch)


def test_where_replicas_do_not_blend_nothing_more_is_computed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = World()
        world.told = {NOT_READ: True}
        assert await world.precompute.order(chunk("a"), "") == "not_blended"
        assert world.precompute.is_off
        sent = len(world.replicas.requests)
        await world.prompt(asked("c", "d"))
        await asyncio.sleep(0.05)
        assert len(world.replicas.requests) == sent
        world.now += precompute.BACK_OFF_S
        assert not world.precompute.is_off

    run(check, monkeypatch)


def test_it_is_an_exact_request_of_the_tenant_behind_all_others_with_one_token_to_sample() -> None:
    made = MissingChunk([5, 6, 7, 8, 9], [b"h"], "exact salt", "tag").request()
    assert (made.prompt_token_ids, made.block_hashes, made.cache_salt) == ([5, 6, 7, 8, 9], [b"h"], "exact salt")
    assert (made.tenant, made.fidelity, made.extras, made.sampling_params.max_tokens) == ("tag", "exact", {}, 1)
    assert (made.priority, made.precomputes) == (FARTHEST_PRIORITY, "blend")
    assert made.request_id != MissingChunk([5], [b"h"], "s", "t").request().request_id


def test_a_caller_that_leaves_a_line_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        places = turns.PrecomputeTurns(lambda: 1)
        places.begins()
        ends = asyncio.Event()

        async def work() -> int:
            await ends.wait()
            return 1

        waiting = [asyncio.create_task(places.when_idle(name, work)) for name in "aab"]
        await asyncio.sleep(0)
        waiting[0].cancel()
        places.ends()
        await asyncio.sleep(0.01)
        waiting[1].cancel()
        ends.set()
        assert await waiting[2] == 1
        assert await places.at_once(work) == 1

    run(check, monkeypatch)


@pytest.mark.parametrize(
    ("kv", "words"),
    [
        ({"enabled": False}, "kv.enabled"),
        ({"load_or_recompute": "recompute"}, "kv.load_or_recompute"),
        ({"cpu_tier_bytes": 0, "redis_url": None}, "kv.cpu_tier_bytes"),
        ({}, None),
    ],
)
def test_settings_that_leave_nothing_to_compute_say_so(kv: dict[str, Any], words: str | None) -> None:
    why = why_off(load_settings({"kv": kv}))
    assert (why is None) if words is None else (why is not None and words in why)
