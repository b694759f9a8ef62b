"""One walk for all replicas says what a walk for each says, whatever was stored, removed and forgotten before."""

from __future__ import annotations

from random import Random

from kvmanager.index.deltas import DeltaLog
from kvmanager.index.device_index import DeviceIndex
from kvmanager.routing.mirror import DeviceHolders
from kvmanager.segments.keys import BlockHash


def test_it_agrees_with_a_walk_for_each_replica_after_random_changes() -> None:
    for seed in range(30):
        rng = Random(seed)
        blocks = [BlockHash(number.to_bytes(4, "big") * 8) for number in range(24)]
        names = ["a", "b", "c", "d"]
        holders, index = DeviceHolders(), DeviceIndex(DeltaLog(1))
        for _ in range(120):
            name, first = rng.choice(names), rng.randrange(len(blocks))
            some = blocks[first : first + rng.randrange(1, 24)] if rng.random() < 0.5 else blocks[: rng.randrange(24)]
            change = rng.choices(["stored", "removed", "forget"], [6, 3, 1])[0]
            if change == "forget":
                holders.forget(name)
                index.forget(name)
            else:
                getattr(holders, change)(name, some)
                getattr(index, change)(name, some)
            asked = [*rng.sample(names, rng.randrange(5)), "nobody"]
            prompt = blocks[: rng.randrange(25)]
            found = holders.leading_blocks(prompt, asked)
            assert found == {name: index.leading_blocks(name, prompt) for name in asked}
        for name in names:
            holders.forget(name)
        assert not holders._masks
        assert not holders._blocks
        assert not holders._bits
