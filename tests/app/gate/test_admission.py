"""The bound on concurrent requests: `AdmissionQueue` itself, and many clients against a running ingress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter

import httpx
import pytest
from fake_backend import FakeReplicas, say, speak
from hypothesis import given
from hypothesis import strategies as st
from ingress_server import COMPLETION
from vllm.exceptions import VLLMValidationError

from app.gate.admission import AdmissionQueue, Ticket
from app.gate.errors import OverloadedError
from configs.settings import load_settings
from kvmanager.scheduling.virtual_counters import ANSWER_COST, ServedWork
from load_tests.harness.patience import patience
from tests.sizes import CLIENTS


def test_one_more_than_the_capacity_is_refused_until_room_is_given_back():
    queue = AdmissionQueue(2, 1)
    tickets = [Ticket(queue) for _ in range(4)]
    for ticket in tickets[:3]:
        ticket.admit(1)
    with pytest.raises(OverloadedError):
        tickets[3].admit(1)
    tickets[0].close()
    tickets[0].close()
    tickets[3].admit(1)
    assert queue.rooms.held == 3


def test_what_never_fits_is_a_bad_request_and_not_an_overload():
    queue = AdmissionQueue(2, 1)
    ticket = Ticket(queue)
    ticket.admit(2)
    with pytest.raises(VLLMValidationError):
        ticket.admit(2)


def test_turns_come_in_order_and_a_cancelled_waiter_frees_its_place():
    async def scenario() -> list[int]:
        queue, order, release = AdmissionQueue(1, 9), [], asyncio.Event()

        async def take(number: int) -> None:
            async with queue.turn():
                order.append(number)
                await release.wait()

        tasks = [asyncio.create_task(take(number)) for number in range(4)]
        await asyncio.sleep(0)
        assert (queue.ongoing, queue.waiting) == (1, 3)
        tasks[1].cancel()
        release.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (queue.ongoing, queue.waiting) == (0, 0)
        return order

    assert asyncio.run(scenario()) == [0, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=60), st.integers(1, 4), st.integers(0, 4))
def test_room_held_is_never_more_than_there_is_and_comes_back_whole(steps, max_ongoing, max_queued):
    queue = AdmissionQueue(max_ongoing, max_queued)
    tickets = [Ticket(queue) for _ in range(5)]
    for which, size in steps:
        if size == 5:
            tickets[which].close()
            continue
        with contextlib.suppress(OverloadedError, VLLMValidationError):
            tickets[which].admit(size)
        assert 0 <= queue.rooms.held <= queue.rooms.capacity
    for ticket in tickets:
        ticket.close()
    assert queue.rooms.held == 0


def test_of_many_clients_each_is_answered_or_told_when_to_come_back(start):
    most = 0
    replicas = FakeReplicas()

    async def slow(request):
        nonlocal most
        running = len(replicas.requests) - finished[0]
        most = max(most, running)
        while not refused.is_set():  # noqa: ASYNC110 - another thread sets it: also clients that come slowly are too many
            await asyncio.sleep(0.01)
        finished[0] += 1
        yield say(request, [10], " one", finished=True)

    finished, refused = [0], threading.Event()
    replicas.script = slow
    server = start(replicas, max_ongoing_requests=8, max_queued_requests=24)

    async def storm() -> tuple[Counter[int], list[httpx.Response]]:
        async def post(client: httpx.AsyncClient) -> httpx.Response:
            answer = await client.post("/v1/completions", json=COMPLETION)
            if answer.status_code == 429:
                refused.set()
            return answer

        async def fifty() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=patience(120)) as client:
                return await asyncio.gather(*(post(client) for _ in range(50)))

        answers = [
            answer for group in await asyncio.gather(*(fifty() for _ in range(CLIENTS // 50))) for answer in group
        ]
        return Counter(answer.status_code for answer in answers), answers

    counts, answers = asyncio.run(storm())
    assert counts[200] + counts[429] == CLIENTS
    assert counts[200] >= 32
    assert counts[429] > 0
    assert most <= 8
    for answer in answers:
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    replicas.script = speak
    with server.http() as client:
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200
        assert client.get("/health").json()["parts"]["ingress"] == {"state": "ok", "ongoing": 0, "waiting": 0}


def test_each_prompt_and_each_answer_of_a_request_takes_room(start):
    server = start(max_ongoing_requests=2, max_queued_requests=2)
    with server.http() as client:
        four = {**COMPLETION, "prompt": ["a", "b"], "n": 2, "temperature": 1}
        five = {**COMPLETION, "prompt": ["a", "b", "c", "d", "e"]}
        answer = client.post("/v1/completions", json=four)
        assert answer.status_code == 200, answer.text
        refused = client.post("/v1/completions", json=five)
    assert refused.status_code == 400
    assert "at most 4 answers" in refused.json()["error"]["message"]


def test_a_tenant_that_fills_the_queue_leaves_another_its_room_and_its_turn():
    async def scenario() -> None:
        queue, refusals, stop = AdmissionQueue(8, 8, ("a", "b")), Counter(), asyncio.Event()
        queue.count_refusal = lambda reason: refusals.update([reason])
        begun: list[str] = []

        async def ask(tenant: str) -> None:
            Ticket(queue, tenant).admit(1)
            async with queue.turn(tenant):
                begun.append(tenant)
                await stop.wait()

        flood = [asyncio.create_task(ask("a")) for _ in range(100)]
        await asyncio.sleep(0)
        assert (len(begun), refusals) == (7, {"tenant_share": 88})
        late = asyncio.create_task(ask("b"))
        await asyncio.sleep(0)
        assert begun[-1] == "b"
        stop.set()
        await asyncio.gather(*flood, late, return_exceptions=True)
        assert (queue.ongoing, queue.waiting) == (0, 0)

    asyncio.run(scenario())


@given(st.lists(st.tuples(st.sampled_from(["ask", "end", "cancel", "wait"]), st.integers(0, 99)), max_size=40))
def test_turns_are_given_back_whole_whoever_is_cancelled_when(steps):
    async def scenario() -> None:
        queue = AdmissionQueue(3, 99, ("a", "b"))
        tasks: list[tuple[asyncio.Task[None], asyncio.Event]] = []

        async def ask(tenant: str, answers: int, end: asyncio.Event) -> None:
            async with queue.turn(tenant, answers):
                await end.wait()

        for step, number in steps:
            if step == "ask":
                end = asyncio.Event()
                tasks.append((asyncio.create_task(ask("ab"[number % 2], 1 + number % 3, end)), end))
            elif step == "wait":
                await asyncio.sleep(0)
            elif tasks:
                task, end = tasks[number % len(tasks)]
                end.set() if step == "end" else task.cancel()
        for _, end in tasks:
            end.set()
        await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        assert (queue.ongoing, queue.waiting, queue._turns.held) == (0, 0, 0)

    asyncio.run(scenario())


def test_what_a_turn_is_expected_to_cost_counts_at_once_and_what_it_costs_at_its_end():
    async def scenario() -> None:
        queue, order, costs = AdmissionQueue(2, 99, ("a", "b")), [], []
        queue.count_cost = lambda tenant, cost: costs.append((tenant, cost))
        ends = {name: asyncio.Event() for name in ("a1", "a2", "b1", "b2", "b3")}

        async def ask(name: str, expected: int) -> None:
            async with queue.turn(name[0], 1, ServedWork(0, 0, expected)) as bill:
                order.append(name)
                await ends[name].wait()
                bill.sampled(1)

        tasks = [asyncio.create_task(ask(*one)) for one in (("a1", 1000), ("a2", 1000), ("b1", 10), ("b2", 10))]
        await asyncio.sleep(0)
        assert order == ["a1", "b1"]
        ends["b1"].set()
        await asyncio.wait(tasks[2:3])
        await asyncio.sleep(0)
        assert order[2:] == ["b2"]  # of two that have had a turn each, whose was cheap
        tasks.append(asyncio.create_task(ask("b3", 10)))
        await asyncio.sleep(0)
        tasks[0].cancel()  # nothing of its 1,000 tokens was sampled
        await asyncio.wait(tasks[:1])
        await asyncio.sleep(0)
        assert order[3:] == ["a2"]
        for end in ends.values():
            end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(costs) == [("a", 0.0), ("a", ANSWER_COST), *[("b", ANSWER_COST)] * 3]

    asyncio.run(scenario())


def test_with_several_tenants_no_more_is_sent_than_the_replicas_compute_at_once():
    keys = {"api_keys": {"key-a": "a", "key-b": "b"}}
    assert AdmissionQueue.from_settings(load_settings({"replicas": 2}))._turns.capacity == 512
    assert AdmissionQueue.from_settings(load_settings({"replicas": 2, "http": keys}))._turns.capacity == 64


def test_a_tenants_short_prompts_go_first_where_the_engines_would():
    async def scenario(shortest: bool) -> list[str]:
        queue, order = AdmissionQueue(1, 99, shortest=shortest), []

        async def ask(name: str, expected: int) -> None:
            async with queue.turn("", 1, ServedWork(0, 0, expected)):
                order.append(name)
                await asyncio.sleep(0)

        await asyncio.gather(*(ask(*one) for one in (("first", 9), ("long", 900), ("short", 3))))
        return order

    assert asyncio.run(scenario(True)) == ["first", "short", "long"]
    assert asyncio.run(scenario(False)) == ["first", "long", "short"]
