"""Serve's own ranks beside the manager's actor: whatever Serve renumbers, no two replicas forget each other.

Leans on ray 2.60.0: `RankManager` of `ray.serve._private.deployment_state` decides the ranks, and Serve keeps the
current one in the process's replica context.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kv_cluster import FINGERPRINT
from ray.serve import context
from ray.serve._private import deployment_state
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.schema import ReplicaRank
from vllm.outputs import RequestOutput

from deployments.manager.actor import KVManagerActor
from deployments.protocol.engine_facts import EngineFacts
from deployments.protocol.wire import KV_CACHE_USAGE
from deployments.replica.replica import Replica
from kvmanager.config import ManagerConfig
from kvmanager.index.deltas import NOTHING_SEEN

NODE = "node"


def rank_manager() -> Any:
    """Serve's book of a deployment's ranks, of one node."""
    return deployment_state.RankManager()


class Polling:
    """A replica as the manager knows it: registers when it is told to, and says at every poll which rank it has."""

    def __init__(self, manager: KVManagerActor, name: str) -> None:
        self.name, self.rank, self.forgotten = name, -1, -1
        self._manager = manager

    async def poll(self) -> None:
        if await self._manager.take_directives(self.name, 0.0, self.rank) is None:
            self.forgotten += 1
            await self._manager.register_replica(self.name, self.rank, NODE, [], EngineFacts(FINGERPRINT))


def test_a_replacement_beside_a_draining_predecessor_and_the_next_one_forget_nobody() -> None:
    async def check() -> None:
        manager = KVManagerActor(ManagerConfig(blocks_per_segment=4))
        ranks = rank_manager()
        members = {name: Polling(manager, name) for name in "ABDE"}

        async def poll_all(*names: str) -> None:
            for _ in range(3):
                for name in names:
                    await members[name].poll()

        for name in "AB":
            members[name].rank = ranks.assign_rank(name)
        await poll_all("A", "B")
        members["D"].rank = ranks.assign_rank("D")  # A drains, and keeps its rank
        await poll_all("A", "B", "D")
        ranks.release_rank("A")
        ranks.check_rank_consistency_and_reassign_minimally(["B", "D"])
        # D has not heard of its new rank when the next replacement starts: both say that they have the same.
        members["E"].rank = ranks.assign_rank("E")
        assert members["E"].rank == members["D"].rank
        await poll_all("B", "D", "E")
        members["D"].rank = ranks.get_rank("D")
        await poll_all("B", "D", "E")

        assert {name: members[name].forgotten for name in "BDE"} == {"B": 0, "D": 0, "E": 0}
        _, known, *_ = await manager.deltas(NOTHING_SEEN, 0.0)
        assert {name: known[name] for name in "BDE"} == {name: members[name].rank for name in "BDE"}
        assert len({known[name] for name in "BDE"}) == 3
        manager._housekeeping.cancel()

    asyncio.run(check())


def test_who_is_renumbered_when_another_is_scaled_away_shares_its_number_with_nobody_for_long() -> None:
    """A dies, C replaces it, C is scaled away and B renumbered, and D comes before B has heard of that."""

    async def check() -> None:
        manager = KVManagerActor(ManagerConfig(blocks_per_segment=4))
        ranks = rank_manager()
        members = {name: Polling(manager, name) for name in "ABCD"}
        blocks = [bytes([number]) * 32 for number in range(4)]

        async def poll(*names: str) -> None:
            for name in names * 2:
                await members[name].poll()

        for name in "AB":
            members[name].rank = ranks.assign_rank(name)
        await poll("A", "B")
        await manager.report_placement("B", [(blocks, [], False)])
        await manager.replica_ends("A", "dead")
        ranks.release_rank("A")
        members["C"].rank = ranks.assign_rank("C")
        assert members["C"].rank == 0
        await poll("B", "C")
        await manager.replica_ends("C")
        ranks.release_rank("C")
        assert ranks.check_rank_consistency_and_reassign_minimally(["B"]) == ["B"]
        members["D"].rank = ranks.assign_rank("D")
        assert (members["B"].rank, members["D"].rank) == (1, 1), "B does not know yet that it is 0"
        await poll("B", "D")
        known = (await manager.deltas(NOTHING_SEEN, 0.0)).ranks
        assert set(known) == {"B", "D"}
        members["B"].rank = ranks.get_rank("B")  # Serve has told its process, and its next poll says so
        await poll("B", "D")

        known = (await manager.deltas(NOTHING_SEEN, 0.0)).ranks
        assert known == {"B": 0, "D": 1}
        assert [members[name].forgotten for name in "BD"] == [0, 0], "neither was forgotten"
        assert manager._brain.offloads.device_blocks("B", blocks) == 4, "and B's device is known all the while"
        assert dict(manager._ended) == {"dead": 1, "hung": 0}
        manager._housekeeping.cancel()

    asyncio.run(check())


def renumber(rank: int) -> None:
    """What Serve does in a replica's process when it reconfigures it."""
    nothing: Any = None
    context._set_internal_replica_context(
        replica_id=ReplicaID("unique", DeploymentID("Replica", "app")),
        servable_object=nothing,
        _deployment_config=nothing,
        rank=ReplicaRank(rank=rank, node_rank=0, local_rank=0),
        world_size=1,
    )


def test_a_replica_says_which_number_it_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_INTERNAL_REPLICA_CONTEXT", None)
    replica: Any = object.__new__(Replica)
    replica._link = replica._engine = None
    output = RequestOutput("r", None, None, None, [], True, kv_transfer_params={KV_CACHE_USAGE: {"replica": "2"}})
    renumber(2)
    assert replica.rank == 2
    renumber(0)
    assert replica.rank == 0
    replica._sign(output)
    assert output.kv_transfer_params == {KV_CACHE_USAGE: {"replica": "0"}}
