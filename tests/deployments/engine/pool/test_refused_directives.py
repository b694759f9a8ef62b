"""A device of a model with windows or states is given nothing without a request, and gives nothing: by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.engine.directive_runner import DirectiveRunner
from deployments.engine.pool import control
from deployments.engine.pool.block_owners import BlockOwners
from deployments.engine.pool.control import Onboarding, PoolControl
from kvmanager.index.locations import Location, Tier
from kvmanager.moves.directives import DeviceDirective, DirectiveOrder, Evict, Offload, Onboard, Outcome
from kvmanager.moves.plan import Plan, PlannedLoad
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import split_segments

HASHES = [BlockHash(bytes([number]) * 32) for number in (1, 2)]
LOAD = PlannedLoad(SegmentKey(HASHES[1]), 0, 2, Tier.CPU, "node", 1, 1)
DEVICE = Location(Tier.DEVICE, "replica")


class Device:
    """A pool that has a prompt of two blocks of one group, and free ones; it notes what is taken and written."""

    def __init__(self, has_windows: bool) -> None:
        self.moved: list[str] = []
        self.cached = {block: SimpleNamespace(block_id=at, ref_cnt=0) for at, block in enumerate(HASHES)}
        self.num_gpu_blocks, self.kv_event_queue, self.medium = 100, [], ""
        self.touch = self.free_blocks = lambda blocks: None
        whatever: Any = self
        parents = {HASHES[0]: None, HASHES[1]: HASHES[0]}
        self.control = PoolControl(
            pool=whatever, transfer=whatever, block_size=16, parents=parents, owners=BlockOwners(),
            publish=lambda: None, on_engine_thread=lambda run: run(), has_windows=has_windows,
        )  # fmt: skip
        self.blocks = list(self.cached.values())
        self.runner = DirectiveRunner(self.control, at_once)

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[Any] | None:
        block = self.cached.get(BlockHash(block_hash))
        return None if block is None else [block]

    def evict_blocks(self, ids: set[int]) -> None:
        self.cached = {name: block for name, block in self.cached.items() if block.block_id not in ids}

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks

    def get_new_blocks(self, count: int) -> list[Any]:
        return [SimpleNamespace(block_id=50 + number) for number in range(count)]

    def submit_save(self, job: Any) -> bool:
        self.moved.append("save")
        job.on_end(1)
        return True

    def submit_load(self, job: Any, deadline: float) -> None:
        self.moved.append("load")
        job.on_end(job.first_block)

    def carry_out(self, directive: DeviceDirective) -> Outcome:
        return asyncio.run(self.runner.carry_out(DirectiveOrder(1, directive, 60.0))).outcome


def at_once(run: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(run())
    return done


DIRECTIVES = {
    "save": Offload(tuple(split_segments(HASHES, 0, 2, 2, 2))),
    "load": Onboard(tuple(HASHES), Plan(segments=(LOAD,), scores=((2, 0.0),))),
}


@pytest.mark.parametrize("moves", DIRECTIVES)
def test_what_moves_kv_without_a_request_is_refused_for_the_model_and_touches_nothing(moves: str) -> None:
    plain, other = Device(has_windows=False), Device(has_windows=True)
    for device in (plain, other):
        if moves == "load":
            device.cached.clear()
    plain.carry_out(DIRECTIVES[moves])
    assert plain.moved == [moves]
    assert other.carry_out(DIRECTIVES[moves]) is Outcome.REFUSED_MODEL
    assert other.moved == []


def test_neither_does_one_of_its_own_requests_bring_anything_ahead() -> None:
    device = Device(has_windows=True)
    device.cached.clear()
    assert device.control.onboard(Onboarding(HASHES, [LOAD], [0.0, 0.0], 60.0), 0) is None
    assert device.control.offload(split_segments(HASHES, 0, 2, 2, 2)) == (0, 0, None)
    assert device.moved == []


def test_its_blocks_can_be_evicted() -> None:
    device = Device(has_windows=True)
    assert device.carry_out(Evict(DEVICE, tuple(map(SegmentKey, HASHES[::-1])))) is Outcome.DONE
    assert device.cached == {}


@pytest.mark.parametrize("has_windows", [True, False])
def test_its_blocks_go_in_vllms_own_order(has_windows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No score says whether a window is still needed."""
    orders: list[str] = []
    monkeypatch.setattr(control, "order_by_hotness", lambda pool: orders.append("hotness"))
    monkeypatch.setattr(control, "order_by_recency", lambda pool: orders.append("recency"))
    Device(has_windows).control.order(by_hotness=True)
    assert (orders[0], orders[-1]) == (("recency", "recency") if has_windows else ("hotness", "recency"))
