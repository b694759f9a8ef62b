"""A new manager learns what the tiers hold while it makes plans: never one too many, and in the end all of it."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from kv_cluster import FINGERPRINT, PATIENCE_S, SEGMENT_BYTES, SIZES, offered, sequence, until
from ray import cloudpickle

from deployments.cpu_tier import actor as cpu_tier
from deployments.cpu_tier.actor import tier_name
from deployments.manager.actor import KVManagerActor
from deployments.protocol.engine_facts import EngineFacts
from deployments.protocol.kv_port import PrefetchGrant
from deployments.protocol.manager_client import SERVE_NAMESPACE
from kvmanager.config import ManagerConfig
from kvmanager.index.locations import Location, Tier
from kvmanager.moves.plan import PlanQuery
from load_tests.harness.patience import patience
from load_tests.harness.tiers import start_manager
from load_tests.micro.index_scale import prompts
from load_tests.micro.manager_rebuild import CONFIG, PROMPT_SEGMENTS, FilledTier

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test

NODE, REPLICA = "node", "replica"
SEGMENTS = 3000
assert SEGMENTS > 2 * cpu_tier.TELL_CHUNK
PROMPTS = list(prompts(0, SEGMENTS, PROMPT_SEGMENTS))


# The manager's side, on a loop of this process.


class NoTier:
    """Nothing is asked of it."""


@pytest.fixture
def managed() -> Callable[[Any], None]:
    def run(test: Any) -> None:
        async def main() -> None:
            manager = KVManagerActor(ManagerConfig(blocks_per_segment=4))
            await manager.register_replica(REPLICA, 0, NODE, [], EngineFacts(FINGERPRINT))
            await asyncio.wait_for(test(manager), patience(20))
            manager._housekeeping.cancel()

        asyncio.run(main())

    return run


async def planned(manager: KVManagerActor, hashes: Any) -> list[bytes]:
    answer = await manager.plan(REPLICA, NODE, PlanQuery(hashes))
    assert answer is not None
    await manager.release([answer.lease_id])
    return [load.key for load in answer.segments]


async def begin(manager: KVManagerActor, spans: Any) -> list[bytes]:
    """A tier tells the first of what it holds."""
    return await manager.register_tier(
        NODE, NoTier(), "life", 100 * SEGMENT_BYTES, spans, [SEGMENT_BYTES] * len(spans), told=False
    )


def test_plans_go_as_far_as_a_tier_has_told(managed: Any) -> None:
    async def check(manager: KVManagerActor) -> None:
        hashes, spans = sequence(1, 6)
        keys = [span.key for span in spans]
        assert await begin(manager, spans[:2]) == keys[:2]
        assert await planned(manager, hashes) == keys[:2]
        assert await manager.adopt_tier(NODE, "life", spans[2:5], [SEGMENT_BYTES] * 3, told=False) == keys[2:5]
        assert await planned(manager, hashes) == keys[:5]
        assert await manager.adopt_tier(NODE, "life", spans[5:], [SEGMENT_BYTES], told=True) == keys[5:]
        assert await planned(manager, hashes) == keys

    managed(check)


def test_nothing_is_saved_in_a_tier_that_has_not_told_all(managed: Any) -> None:
    async def check(manager: KVManagerActor) -> None:
        _, spans = sequence(2, 3)
        new = sequence(3, 1)[1]
        await begin(manager, spans[:1])
        assert await manager.offer(REPLICA, NODE, offered(new), SIZES) is None
        assert await manager.prefetch(REPLICA, NODE, [new[0].key]) == PrefetchGrant()
        await manager.adopt_tier(NODE, "life", spans[1:], [SEGMENT_BYTES] * 2, told=True)
        assert (await manager.offer(REPLICA, NODE, offered(new), SIZES) or (0, []))[1] == new

    managed(check)


def test_what_another_life_of_a_tier_tells_is_not_indexed(managed: Any) -> None:
    async def check(manager: KVManagerActor) -> None:
        hashes, spans = sequence(4, 2)
        await begin(manager, spans[:1])
        assert await manager.adopt_tier(NODE, "earlier life", spans[1:], [SEGMENT_BYTES], told=True) is None
        assert await manager.adopt_tier("elsewhere", "life", spans[1:], [SEGMENT_BYTES], told=True) is None
        assert await planned(manager, hashes) == [spans[0].key]

    managed(check)


# Both sides, over a real Ray.


class ForgetfulManager(KVManagerActor):
    """Is a new one, once, in the middle of a tier's telling."""

    calls = 0
    new_at = 2

    async def adopt_tier(self, node_id: str, *told: Any) -> list[bytes] | None:
        self.calls += 1
        if self.calls == self.new_at:
            self._tiers.cpu.clear()
            self._brain.forget_holder(Location(Tier.CPU, NODE))
        return await super().adopt_tier(node_id, *told)


class ManagerThatForgetsAtOnce(ForgetfulManager):
    """The same, while the tier registers."""

    new_at = 1


class Rebuilt:
    """One application: a tier of 3,000 small segments, and its managers one after the other."""

    def __init__(self, app: str, actor_class: type[KVManagerActor]) -> None:
        self.app = app
        self.manager = start_manager(app, CONFIG, actor_class=actor_class)
        options = {"name": tier_name(app, NODE), "namespace": SERVE_NAMESPACE, "num_cpus": 0}
        self.tier = ray.remote(FilledTier).options(**options).remote(app, NODE, SEGMENTS)

    def ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.manager, method).remote(*args), timeout=patience(PATIENCE_S))

    def ask_tier(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.tier, method).remote(*args), timeout=patience(PATIENCE_S))

    def indexed(self) -> int:
        return sum(location["segments"] for location in self.ask("api", "stats")["locations"])

    def planned(self, hashes: Any) -> list[bytes]:
        if (answer := self.ask("plan", REPLICA, NODE, PlanQuery(hashes))) is None:
            self.ask("register_replica", REPLICA, 0, NODE, PROMPTS[0][0][:8], EngineFacts(FINGERPRINT))
            return self.planned(hashes)
        self.ask("release", [answer.lease_id])
        return [load.key for load in answer.segments]

    def kill_manager(self) -> None:
        ray.kill(self.manager)

    def start_manager(self) -> None:
        def started() -> bool:
            try:
                self.manager = start_manager(self.app, CONFIG)
            except ValueError:  # Ray has not noticed yet that the name is free
                return False
            return True

        until(started, "the name of the manager is free")

    def close(self) -> None:
        ray.kill(self.tier)
        ray.kill(self.manager)


@pytest.fixture
def rebuilt(ray_cluster: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Rebuilt]]:
    running: list[Rebuilt] = []

    def start(actor_class: type[KVManagerActor] = KVManagerActor) -> Rebuilt:
        running.append(Rebuilt(request.node.name, actor_class))
        return running[-1]

    yield start
    for one in running:
        one.close()


@pytest.mark.server
def test_plans_made_during_a_rebuild_name_only_what_the_tier_holds_and_then_all_of_it(rebuilt: Any) -> None:
    it = rebuilt()
    until(lambda: it.indexed() == SEGMENTS, "the first manager knows all")
    it.kill_manager()
    # What nobody can tell a manager that is dead: some chains lose their ends.
    lost = {span.key for _, spans in PROMPTS[::7] for span in spans[5:]}
    it.ask_tier("evict", list(lost))

    it.start_manager()

    full = False
    for number in itertools.count():
        chosen = PROMPTS if full else [PROMPTS[number % len(PROMPTS)]]
        for hashes, spans in chosen:
            plan, keys = it.planned(hashes), [span.key for span in spans if span.key not in lost]
            assert plan == keys[: len(plan)], "a plan is a beginning of what the tier holds"
            assert not full or plan == keys
        if full:
            break
        full = it.indexed() == SEGMENTS - len(lost)
    assert it.ask("api", "lookup", PROMPTS[0][0])["device"] == {"0": 8}, "the replica has told what its device holds"
    assert it.ask_tier("stats")["segments"] == SEGMENTS - len(lost), "the tier has kept all of it"


@pytest.mark.server
@pytest.mark.parametrize("manager", [ForgetfulManager, ManagerThatForgetsAtOnce])
def test_a_manager_that_was_recreated_while_a_tier_told_it_costs_the_tier_nothing(
    rebuilt: Any, manager: type[KVManagerActor]
) -> None:
    it = rebuilt(manager)
    until(lambda: it.indexed() == SEGMENTS, "the tier has begun again")
    assert it.ask_tier("stats")["segments"] == SEGMENTS
    assert it.planned(PROMPTS[-1][0]) == [span.key for span in PROMPTS[-1][1]]
