"""An offload of a chain in which a segment leaves its parent inside: each block is saved under its own hash."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.engine.pool.block_owners import BlockOwners, Owner
from deployments.engine.pool.control import PoolControl
from deployments.transfer.jobs import SaveJob
from kvmanager.config import ManagerConfig
from kvmanager.index.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.keys import EXACT, TOLERANT, BlockHash, Fidelity
from kvmanager.segments.spans import MARK_BYTES, SegmentSpan

CUT = 8
HERE = Location(Tier.CPU, "node")
TRUNK = [BlockHash(bytes([number]) * 32) for number in range(1, 9)]
BRANCH = TRUNK[:3] + [BlockHash(bytes([number]) * 32) for number in range(101, 110)]
"""Leaves the trunk's only segment after its third block, and has another segment behind that."""


class Device:
    """The pool of a replica that holds blocks, and the saves that are begun there."""

    def __init__(self, *sequences: list[BlockHash]) -> None:
        parents: dict[bytes, bytes | None] = {}
        for sequence in sequences:
            parents |= dict(zip(sequence, [None, *sequence], strict=False))
        self.ids: dict[bytes, int] = {block: number for number, block in enumerate(parents)}
        self.blocks = [SimpleNamespace(block_id=number) for number in self.ids.values()]
        self.saves: list[SaveJob] = []
        self.touch = self.free_blocks = lambda blocks: None
        whatever: Any = self
        self.owners = BlockOwners()
        self.control = PoolControl(
            pool=whatever, transfer=whatever, block_size=16, parents=parents, owners=self.owners,
            publish=lambda: None, on_engine_thread=lambda run: run(),
        )  # fmt: skip

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[Any] | None:
        number = self.ids.get(block_hash)
        return None if number is None else [self.blocks[number]]

    def submit_save(self, job: SaveJob) -> bool:
        self.saves.append(job)
        return True


@pytest.fixture
def manager() -> KVManager:
    """What it knows lies in no tier any more; the branch is the hottest."""
    made = KVManager(ManagerConfig(CUT), epoch=1)
    made.set_budget(HERE, 1000)
    for hashes in (TRUNK, BRANCH):
        store(made, hashes, 0)
    made.clear({Tier.CPU})
    made.plan(0.0, "replica", "node", PlanQuery(BRANCH))
    return made


def store(manager: KVManager, hashes: list[BlockHash], first: int) -> list[SegmentSpan]:
    spans = manager.cut(HERE, hashes, first, len(hashes), len(hashes))
    offer = manager.offer(0.0, "replica", HERE, spans, [1] * len(spans))
    manager.commit(0.0, HERE, offer.keys, [1] * len(spans))
    return spans


def offloaded(manager: KVManager, device: Device) -> None:
    """Carry out what the manager orders, as a replica does."""
    manager.device_stored("replica", device.ids)
    spans = manager.offloads.candidates("replica", 9, HERE)
    while spans:
        begun, blocks, _ = device.control.offload(spans)
        if not begun:
            return
        job = device.saves[-1]
        assert blocks == job.num_blocks == job.offered.end_block - job.offered.first_block
        granted = store(manager, list(job.offered.hashes), job.offered.first_block)
        for span in granted:
            marks = {number: block[:MARK_BYTES] for block, number in device.ids.items()}
            assert b"".join(marks[number] for number in job.ids_of(span)) == span.marks, "KV of other blocks"
        spans = spans[begun:]


def test_a_segment_that_leaves_its_parent_inside_is_saved_with_its_own_blocks(manager: KVManager) -> None:
    offloaded(manager, Device(TRUNK, BRANCH))
    assert manager.lookup(BRANCH)["cpu"] == len(BRANCH)


def test_what_the_branch_does_not_need_of_the_trunk_may_have_left_the_device(manager: KVManager) -> None:
    offloaded(manager, Device(TRUNK[:5], BRANCH))
    assert manager.lookup(BRANCH)["cpu"] == len(BRANCH)


@pytest.mark.parametrize("fidelity", [EXACT, TOLERANT])
def test_what_is_offloaded_says_the_fidelity_of_its_names(manager: KVManager, fidelity: Fidelity) -> None:
    device = Device(TRUNK)
    device.owners.claim(TRUNK[0], Owner("", fidelity))
    device.owners.stored(TRUNK, None)
    (span,) = manager.cut(HERE, TRUNK, 0, len(TRUNK), len(TRUNK))
    device.control.offload([span])
    assert [job.fidelity for job in device.saves] == [fidelity]
