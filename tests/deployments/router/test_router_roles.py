"""Replicas with roles, as the router sees them: which phase goes where, and what it tells the ingress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from named_replicas import DEPLOYMENT, REPLICAS, NoManager, Routing, ask, block_names, stored

from deployments.router import placement_feed
from deployments.router.running_replicas import DecodeView, decode_view
from kvmanager.index.deltas import Deltas

ROLES = {"a": "prefill", "b": "decode", "c": "decode"}


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Routing], Awaitable[None]]], None]:
    """Runs a test's coroutine with a `Routing` whose replicas are three with roles."""
    monkeypatch.setattr(placement_feed, "ManagerClient", NoManager)

    def run(test: Callable[[Routing], Awaitable[None]]) -> None:
        async def main() -> None:
            routing = Routing()
            routing.router._replicas = {replica.replica_id: replica for replica in REPLICAS}
            routing.router._follow_placement().roles = dict(ROLES)
            await test(routing)

        asyncio.run(main())

    return run


def test_a_phase_goes_to_the_replicas_of_its_role(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        blocks = block_names(0, 20)
        routing.hear(("dev+", "a", blocks), ("dev+", "c", blocks[:16]))
        assert await routing.order(ask(blocks, 650, phase="decode")) == ["c", "b"], "the longer prefix is on a"
        assert await routing.order(ask(blocks, 650, phase="prefill")) == ["a"]
        assert (await routing.order(ask(blocks, 650)))[0] == "a"
        assert await routing.order(ask(blocks, 650, phase="decode", prefer="a")) == ["c", "b"], "its role is another"

    routed(check)


def test_a_role_that_nobody_can_be_chosen_of_falls_back_to_all(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        assert sorted(await routing.order(ask([], 650, phase="prefill", avoid=("a",)))) == ["b", "c"]
        routing.router._follow_placement().roles = {"a": "prefill"}
        assert sorted(await routing.order(ask([], 650, phase="decode"))) == ["b", "c"], "they have no role, and do both"
        routing.router._follow_placement().roles = dict.fromkeys("abc", "prefill")
        assert sorted(await routing.order(ask([], 650, phase="decode"))) == ["a", "b", "c"]

    routed(check)


def test_prefills_are_spread_by_prefill_and_decodes_by_blocks(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        routing.router._follow_placement().roles = {"a": "prefill", "b": "prefill", "c": "decode"}
        routing.hear(("dev+", "a", block_names(100, 60)))
        decoding = ask(block_names(100, 60), 1950)
        await routing.send(decoding, "a", "long")
        decoding.progress.first_token = True
        await routing.send(ask(block_names(200, 1), 40), "b", "short")
        # b has 40 tokens to compute, a decodes on 61 blocks.
        assert (await routing.order(ask(block_names(300, 2), 70, avoid=("c",))))[0] == "b"
        assert (await routing.order(ask(block_names(300, 2), 70, phase="prefill")))[0] == "a"

    routed(check)


def test_the_ingress_hears_what_the_best_decode_replica_lacks(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        view, blocks = decode_view(DEPLOYMENT.app_name), block_names(0, 20)
        assert view.lacking_tokens(ask(blocks, 650)) == 650
        routing.hear(("dev+", "a", blocks), ("dev+", "c", blocks[:4]))
        assert view.lacking_tokens(ask(blocks, 650)) == 650 - 4 * 32, "what a prefill replica has does not count"
        routing.hear(*stored(blocks[:16]))
        assert view.lacking_tokens(ask(blocks, 650)) == 650 - 16 * 32

    routed(check)


def test_where_a_role_is_missing_nothing_is_said(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        view = decode_view(DEPLOYMENT.app_name)
        routing.router._replicas = {one.replica_id: one for one in REPLICAS if one.replica_id.unique_id != "a"}
        assert view.lacking_tokens(ask([], 650)) is None, (
            "the prefill replica is gone, and the manager has not told yet"
        )
        routing.router._follow_placement().roles = {}
        assert view.lacking_tokens(ask([], 650)) is None

    routed(check)


def test_without_a_router_nothing_is_said() -> None:
    assert DecodeView().lacking_tokens(ask([], 650)) is None


def test_roles_come_with_the_feed_and_go_with_it(routed: Any) -> None:
    async def check(routing: Routing) -> None:
        feed = routing.router._follow_placement()
        nothing = Deltas(1, 1, 0, [])
        feed.hear(nothing, {"a": 0}, {}, {"a": "decode"})
        assert feed.roles == {"a": "decode"}
        feed.hear(nothing, {"a": 0})
        assert feed.roles == {}

    routed(check)
