"""Emptying a device in slices of a bounded size, of vLLM's own pool, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from deployments.engine.pool.control import MOST_BLOCKS, MOST_LOOKED_AT, PoolControl
from deployments.engine.pool.events import PlacementPublisher
from deployments.engine.pool.hotness_queue import order_by_hotness

BLOCKS = 3000
ALICE, BOB = "alice", "bob"


class Port:
    """Remembers how many blocks each report tells to be gone."""

    def __init__(self) -> None:
        self.removed: list[int] = []

    def report_placement(self, stored: list[bytes], removed: list[bytes], cleared: bool) -> None:
        assert not cleared
        self.removed.append(len(removed))


class Device:
    """A pool that is full of blocks, by turns of each tenant and of none."""

    def __init__(self, owners: tuple[str, ...]) -> None:
        kv_cache_utils.init_none_hash(sha256_cbor)
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=32, enable_kv_cache_events=True)
        queue = order_by_hotness(self.pool)
        self.port = Port()
        port: Any = self.port
        self.publisher = PlacementPublisher(port, self.has)
        anything: Any = None
        self.control = PoolControl(
            pool=self.pool, transfer=anything, block_size=32, parents=self.publisher.parents,
            owners=self.publisher.owners, publish=self.publish, on_engine_thread=lambda call: call(),
        )  # fmt: skip
        self.control.queue = queue
        taken = self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        self.names = {owner: set[bytes]() for owner in owners}
        for number, block in enumerate(taken):
            self.names[owners[number % len(owners)]].add(self.store(block, owners[number % len(owners)], number))
        self.pool.free_blocks(taken)
        self.publish()
        self.port.removed.clear()

    def store(self, block: Any, owner: str, number: int) -> bytes:
        name = number.to_bytes(32, "big")
        whole = make_block_hash_with_group_id(BlockHash(name), 0)
        self.pool._insert_block_hash(whole, block, num_tokens=32)
        if owner:
            self.publisher.owners._owners[name] = owner
        return name

    def has(self, name: bytes) -> bool:
        return self.pool.get_cached_block(BlockHash(name), [0]) is not None

    def held(self) -> dict[str, int]:
        return {owner: sum(map(self.has, names)) for owner, names in self.names.items()}

    def publish(self) -> None:
        self.publisher.publish(SimpleNamespace(events=self.pool.take_events()))


def slices(device: Device, tenant: str | None) -> list[int]:
    """The blocks that each slice clears, until the last one."""
    cleared, first = [], 0
    while True:
        blocks, first = device.control.clear(tenant, first)
        cleared.append(blocks)
        if not first:
            return cleared


@pytest.mark.parametrize("tenant", [None, ALICE])
def test_each_slice_clears_a_bounded_number_of_blocks_and_all_together_all(tenant: str | None) -> None:
    device = Device((ALICE, BOB, ""))
    before = device.held()

    cleared = slices(device, tenant)

    assert max(cleared) <= MOST_BLOCKS
    assert device.port.removed == [count for count in cleared if count], "each slice reports its own"
    gone = {owner for owner in before if tenant in (None, owner)}
    assert device.held() == {owner: 0 if owner in gone else count for owner, count in before.items()}
    assert sum(cleared) == sum(before[owner] for owner in gone)
    assert device.pool.get_num_free_blocks() == BLOCKS - 1
    assert not any(slices(device, tenant))


@pytest.mark.parametrize("tenant", ["", "carol"])
def test_where_nothing_is_a_tenants_a_slice_passes_a_bounded_number_and_clears_none(tenant: str) -> None:
    device = Device((ALICE, ""))
    before = device.held()
    assert slices(device, tenant) == [0] * -(-BLOCKS // MOST_LOOKED_AT)
    assert device.held() == before


def test_a_block_that_lies_here_twice_and_one_in_use_leave_the_cache_too() -> None:
    device = Device((ALICE,))
    twice, used = device.pool.get_new_blocks(2)
    device.store(twice, ALICE, 100)
    device.pool.free_blocks([twice])
    name = device.store(used, ALICE, BLOCKS)
    slices(device, ALICE)
    assert not device.has((100).to_bytes(32, "big"))
    assert not device.has(name)
    assert used.ref_cnt == 1, "its request keeps it"


def test_what_is_computed_behind_a_clear_under_way_stays() -> None:
    device = Device((ALICE,))
    _, first = device.control.clear(ALICE)
    (block,) = device.pool.get_new_blocks(1)
    while block.block_id >= first:
        _, first = device.control.clear(ALICE, first)
    name = device.store(block, ALICE, BLOCKS)
    while first:
        _, first = device.control.clear(ALICE, first)
    assert device.has(name)
