"""Which replica a prompt goes to, with Serve's real router class over replicas that only have a name."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import ray
from named_replicas import BLOCK, DEPLOYMENT, REPLICAS, NoManager, Routing, ask, block_names, pending, stored
from ray.serve._private.common import RequestMetadata
from ray.serve._private.request_router.common import RequestRoutingContext
from ray.serve.request_router import RequestRouter

from deployments.protocol.wire import KEEP_S, FailedReplicas, GenerateRequest, PinnedCall, Progress
from deployments.router import placement_feed
from deployments.router import prefix_affinity as router
from deployments.router.prefix_affinity import EXPECTED_S
from deployments.router.running_replicas import running_replicas
from kvmanager.index.locations import Tier
from kvmanager.loading.load_rates import ALL_REPLICAS
from kvmanager.routing.spreading import Spread


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Routing], Awaitable[None]]], None]:
    """Runs a test's coroutine with a `Routing` on a loop of its own."""
    monkeypatch.setattr(placement_feed, "ManagerClient", NoManager)

    def run(test: Callable[[Routing], Awaitable[None]]) -> None:
        async def main() -> None:
            await test(Routing())

        asyncio.run(main())

    return run


def test_a_prompt_goes_where_its_prefix_is(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        blocks = block_names(0, 20)
        routing.hear(("dev+", "b", blocks[:16]), ("dev+", "c", blocks[:4]))
        assert await routing.order(ask(blocks, 650)) == ["b", "c", "a"]
        routing.hear(("dev0", "b"))
        assert (await routing.order(ask(blocks, 650)))[0] == "c"

    routed(check)


def test_a_busy_replica_with_the_prefix_loses_to_an_idle_one_with_the_cpu_tier(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        blocks = block_names(0, 16)
        routing.hear(("dev+", "b", blocks))
        routing.hear(*stored(blocks))
        assert (await routing.order(ask(blocks, 520)))[0] == "b"
        await routing.send(ask(block_names(100, 30), 960), "b", "long")
        assert (await routing.order(ask(blocks, 520)))[0] != "b"

    routed(check)


def test_a_tolerant_prompt_counts_what_is_stored_of_its_exact_twin(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        own, exact = block_names(0, 16), block_names(100, 16)
        routing.hear(("dev+", "b", own[:8]), ("dev+", "c", exact))
        tolerant = ask(own, 520, exact_block_hashes=exact)
        assert (await routing.order(tolerant))[0] == "b", "no device knows a block by its twin's name"
        routing.hear(*stored(exact))
        await routing.send(ask(block_names(200, 30), 960), "b", "some work")
        assert (await routing.order(tolerant))[0] != "b", "what b holds is worth little more than what all can load"
        assert (await routing.order(ask(own, 520)))[0] == "b"

    routed(check)


async def burst(routing: Routing, prompts: list[GenerateRequest]) -> list[int]:
    """Send prompts at one instant; how many of them each replica gets."""
    sent = []
    for number, request in enumerate(prompts):
        replica = (await routing.order(request))[0]
        await routing.send(request, replica, str(number))
        sent.append(replica)
    return [sent.count(name) for name in "abc"]


def test_a_burst_of_unrelated_prompts_does_not_herd(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        prompts = [ask(block_names(100 * number, 10), 330) for number in range(30)]
        assert await burst(routing, prompts) == [10, 10, 10]

    routed(check)


def test_prompts_that_are_chosen_for_at_one_time_do_not_herd(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        prompts = [ask(block_names(100 * number, 10), 330) for number in range(6)]
        first = [(await routing.choose(prompt, str(number)))[0] for number, prompt in enumerate(prompts)]
        assert sorted(first) == list("aabbcc"), "Serve carries none of them out before all are chosen"
        again = [(await routing.choose(prompt, str(number)))[0] for number, prompt in enumerate(prompts)]
        assert sorted(again) == list("aabbcc"), "it asks again where a replica was full"

    routed(check)


def test_a_choice_that_is_never_carried_out_is_forgotten(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        long, short = ask(block_names(0, 60), 1950), ask(block_names(100, 10), 330)
        cancelled = (await routing.choose(long, "cancelled"))[0]
        assert (await routing.order(short))[-1] == cancelled
        # The module cannot be patched: once Serve had the class in this process, its methods have globals of their own.
        expected = routing.router._expected
        expected["cancelled"] = replace(expected["cancelled"], at=expected["cancelled"].at - 2 * EXPECTED_S)
        await routing.order(short)
        assert [routing.router._state.wait(name, None, 330) for name in "abc"] == [330.0] * 3

    routed(check)


def test_a_burst_of_equal_prompts_is_computed_at_few_replicas_and_served_by_all(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        first = await burst(routing, [ask(block_names(0, 10), 330) for _ in range(4)])
        assert 0 in first, "the second prompt follows the first, which will have left its KV"
        total = await burst(routing, [ask(block_names(0, 10), 330) for _ in range(60)])
        assert min(total) > 0
        assert max(total) < 40

    routed(check)


def test_the_first_token_ends_the_prefill_that_a_request_counts_for(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        long, short = ask(block_names(0, 60), 1950), ask(block_names(100, 10), 330)
        await routing.send(long, "a", "long")
        await routing.send(short, "b", "b")
        await routing.send(short, "c", "c")
        assert (await routing.order(ask(block_names(200, 2), 70)))[-1] == "a"
        long.progress.first_token = True
        assert (await routing.order(ask(block_names(200, 2), 70)))[0] == "a", "only its 61 blocks of decode count"

    routed(check)


def test_what_is_held_of_a_prompt_is_looked_up_once_per_request(routed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(routing: Routing) -> None:
        mirror, asked = routing.router._follow_placement().mirror, []
        coverages = mirror.coverages

        def counted(hashes: Any, replicas: Any, *exact: Any) -> Any:
            asked.append(sorted(replicas))
            return coverages(hashes, replicas, *exact)

        monkeypatch.setattr(mirror, "coverages", counted)
        blocks = block_names(0, 20)
        routing.hear(("dev+", "b", blocks))
        routing.router._replicas = {replica.replica_id: replica for replica in REPLICAS}
        await routing.send(ask(blocks, 650), "b", "r")
        assert asked == [["a", "b", "c"]]
        await routing.send(ask(blocks, 650, avoid=("a",)), "b", "again")
        assert asked[1:] == [["b", "c"], ["a"]], "one that was avoided is needed for the decision to spread"

    routed(check)


def test_the_late_end_of_a_first_attempt_leaves_the_second_ones_load_alone(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        request = ask([], 650)
        await routing.send(request, "a", "r")
        await routing.send(request, "b", "r")  # Serve asks again, under the same id: the first replica refused, or died
        loaded = routing.router._state.wait("b", None, 0)
        routing.complete("a", "r")
        assert routing.router._state.wait("b", None, 0) == loaded > 0
        routing.complete("b", "r")
        assert routing.router._state.wait("b", None, 0) == 0

    routed(check)


def test_a_completed_request_counts_no_more(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        request = ask(block_names(0, 60), 1950)
        for name in "abc":
            await routing.send(request, name, name)
        routing.complete("b", "b")
        assert (await routing.order(ask(block_names(200, 2), 70)))[0] == "b"
        routing.complete("b", "b")
        routing.complete("a", "a")
        routing.complete("c", "c")
        assert [routing.router._state.wait(name, None, 0) for name in "abc"] == [0, 0, 0]
        assert routing.router._in_prefill == {}

    routed(check)


def test_a_prompt_follows_one_of_the_same_beginning_that_is_on_its_way(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        blocks = block_names(0, 20)
        await routing.send(ask(blocks, 650), "b", "first")
        assert (await routing.order(ask([*blocks[:16], *block_names(50, 4)], 650)))[0] == "b"
        routing.complete("b", "first")
        assert (await routing.order(ask([*blocks[:16], *block_names(50, 4)], 650)))[0] != "b"

    routed(check)


def test_measured_credits_replace_those_of_the_settings(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        blocks = block_names(0, 16)
        routing.hear(("dev+", "b", blocks), *stored(blocks))
        await routing.send(ask(block_names(100, 15), 500), "b", "busy")
        feed = routing.router._follow_placement()
        feed.credits = {ALL_REPLICAS: {Tier.CPU: 0.99}}
        assert (await routing.order(ask(blocks, 520)))[0] == "a", "loading costs next to nothing"
        feed.credits = {ALL_REPLICAS: {Tier.CPU: 0.1}}
        assert (await routing.order(ask(blocks, 520)))[0] == "b"
        feed.credits = {ALL_REPLICAS: {Tier.CPU: 0.1}, "c": {Tier.CPU: 0.99}}
        assert (await routing.order(ask(blocks, 520)))[0] == "c"

    routed(check)


def test_a_prefix_too_hot_for_its_replica_is_ordered_to_another(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        hot = block_names(0, 32)
        routing.hear(("dev+", "b", hot))
        routing.router._replicas = {replica.replica_id: replica for replica in REPLICAS}
        ordered: list[Spread] = []
        routing.router._follow_placement().order = ordered.append
        for number in range(40):
            request = ask([*hot, *block_names(1000 + number, 8)], 40 * BLOCK)
            await routing.send(request, (await routing.order(request))[0], str(number))
        assert ordered
        assert ordered[0].source == "b"
        assert list(ordered[0].hashes) == hot

    routed(check)


def test_the_manager_hears_whom_serve_takes_away_and_not_who_has_died(
    routed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(routing: Routing) -> None:
        told: list[Any] = []
        monkeypatch.setattr(NoManager, "tell", lambda self, *call: told.append(call), raising=False)
        running = running_replicas(DEPLOYMENT.app_name)
        monkeypatch.setattr(running, "is_dead", lambda name: name == "c")
        heard: list[int] = []
        running.listen(heard.append)
        routing.router._follow_placement()
        routing.router.update_replicas(REPLICAS)
        routing.router.update_replicas(REPLICAS[:1])
        routing.router.update_replicas(REPLICAS[:1])
        assert told == [("api", "drain", ["b"], ["a"])]
        assert heard[-3:] == [3, 1, 1]

    routed(check)


def test_a_pinned_request_has_one_choice_and_an_unknown_pin_none(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        routing.router._follow_placement().ranks = {"a": 2, "b": 0, "c": 1}
        assert await routing.order(ask([], 70, replica_pin=2)) == ["a"]
        assert await routing.order(PinnedCall("c")) == ["c"]
        assert await routing.order(ask([], 70, replica_pin=9)) == []

    routed(check)


def test_a_prompt_that_is_sent_again_avoids_the_replica_that_failed_it(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        blocks = block_names(0, 20)
        routing.hear(("dev+", "b", blocks))
        assert (await routing.order(ask(blocks, 650)))[0] == "b"
        assert sorted(await routing.order(ask(blocks, 650, avoid=("b",)))) == ["a", "c"]
        assert await routing.order(ask(blocks, 650, avoid=("b", "a"))) == ["c"]

    routed(check)


def test_a_prompt_goes_to_a_replica_to_avoid_rather_than_nowhere(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        assert sorted(await routing.order(ask([], 70, avoid=("a", "b", "c", "gone")))) == ["a", "b", "c"]

    routed(check)


def test_a_preferred_replica_comes_first_if_it_can_be_chosen(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        blocks, failed = block_names(0, 20), FailedReplicas()
        routing.hear(("dev+", "b", blocks), ("dev+", "a", blocks[:4]))
        assert await routing.order(ask(blocks, 650, prefer="c")) == ["c", "b", "a"]
        assert await routing.order(ask(blocks, 650, prefer="c", avoid=("b",))) == ["c", "a"]
        assert await routing.order(ask(blocks, 650, prefer="c", avoid=("c",))) == ["b", "a"]
        assert await routing.order(ask(blocks, 650, prefer="gone")) == ["b", "a", "c"]
        failed.note("c")
        assert await routing.order(ask(blocks, 650, prefer="c", progress=Progress(failed=failed))) == ["b", "a", "c"]

    routed(check)


def test_a_replica_that_has_just_failed_is_the_last_choice_of_others(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        now = [0.0]
        failed = FailedReplicas(clock=lambda: now[0])
        blocks = block_names(0, 20)
        routing.hear(("dev+", "b", blocks), ("dev+", "c", blocks[:4]))

        async def order() -> list[str]:
            return await routing.order(ask(blocks, 650, progress=Progress(failed=failed)))

        assert await order() == ["b", "c", "a"]
        failed.note("b")
        assert await order() == ["c", "a", "b"]
        failed.note("c")
        assert await order() == ["a", "b", "c"]
        now[0] = KEEP_S
        assert await order() == ["b", "c", "a"]

    routed(check)


def test_the_router_tells_which_replica_took_the_request(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        request = ask([], 70)
        await routing.order(request)
        assert request.progress.replica == ""
        await routing.send(request, "c", "r")
        assert request.progress.replica == "c"

    routed(check)


def test_what_ingress_and_router_tell_each_other_stays_in_their_process() -> None:
    failed = FailedReplicas()
    failed.note("a")
    request = ask([], 70, avoid=("a",), progress=Progress(first_token=True, replica="a", failed=failed))
    copy = pickle.loads(pickle.dumps(request))
    assert copy.avoid == ("a",)
    assert (copy.progress.first_token, copy.progress.replica, "a" in copy.progress.failed) == (False, "", False)


def test_other_calls_may_go_anywhere(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        assert await routing.router.choose_replicas(REPLICAS, pending("a health check")) == [REPLICAS]
        assert await routing.router.choose_replicas(REPLICAS, None) == [REPLICAS]

    routed(check)


def test_every_choice_backs_off_when_all_are_full(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        request = pending(ask([], 70))
        await routing.router.choose_replicas(REPLICAS, request)
        assert request.routing_context.should_backoff

    routed(check)


def test_serves_routing_interface_is_what_the_router_was_written_for() -> None:
    expected = {
        "initialize_state": ["kwargs"],
        "choose_replicas": ["candidate_replicas", "pending_request"],
        "on_request_routed": ["pending_request", "replica_id", "result"],
        "on_request_completed": ["replica_id", "internal_request_id"],
        "update_replicas": ["replicas"],
    }
    for name, parameters in expected.items():
        found = list(inspect.signature(getattr(RequestRouter, name)).parameters)[1:]
        assert found == parameters, f"ray {ray.__version__} changed RequestRouter.{name}"
    assert "should_backoff" in RequestRoutingContext.__dataclass_fields__
    assert "internal_request_id" in RequestMetadata.__dataclass_fields__
    assert "self._replicas" in inspect.getsource(RequestRouter.update_replicas)
    assert not hasattr(router, "torch")


def test_serve_names_a_deployment_actor_as_the_managers_clients_expect() -> None:
    from ray.serve._private.constants import SERVE_NAMESPACE
    from ray.serve._private.utils import get_deployment_actor_name

    from deployments.protocol import manager_client

    name = get_deployment_actor_name(DEPLOYMENT, manager_client.MANAGER_ACTOR, "version")
    assert name.startswith("SERVE_DEPLOYMENT_ACTOR::chat::replica::"), f"ray {ray.__version__} changed {name}"
    assert name.endswith(f"::{manager_client.MANAGER_ACTOR}")
    assert manager_client.SERVE_NAMESPACE == SERVE_NAMESPACE
