import tracemalloc

import pytest

from kvmanager.config import ManagerConfig
from kvmanager.index import snapshots
from kvmanager.index.deltas import HASHES_PER_EVENT, NOTHING_SEEN, Position
from kvmanager.manager import KVManager
from kvmanager.routing.mirror import PlacementMirror, TierHits


def catch_up(mirror, manager, limit=100):
    while not mirror.apply(deltas := manager.deltas_since(mirror.position, limit)) or deltas.more:
        pass


@pytest.fixture
def mirror():
    return PlacementMirror(blocks_per_segment=2)


def test_each_block_counts_at_the_fastest_tier(brain, mirror):
    brain.manager.set_budget(brain.redis, 10)
    brain.serve("abcd")
    brain.serve("abcdef", location=brain.redis)
    brain.manager.device_stored("replica", brain.hashes("a"))
    catch_up(mirror, brain.manager)
    assert mirror.coverage(brain.hashes("abcdefgh"), "replica") == TierHits(device=1, cpu=3, redis=2)
    assert mirror.coverage(brain.hashes("abcdefgh"), "other") == TierHits(device=0, cpu=4, redis=2)


def test_blocks_behind_a_hole_of_the_device_do_not_count(brain, mirror):
    brain.manager.device_stored("replica", brain.hashes("abcd"))
    brain.manager.device_removed("replica", brain.hashes("abcd")[1:2])
    catch_up(mirror, brain.manager)
    assert mirror.coverage(brain.hashes("abcd"), "replica") == TierHits(1, 0, 0)


def test_a_mirror_that_missed_events_keeps_its_view_and_fetches_a_snapshot(brain_with, mirror):
    brain = brain_with(max_deltas=2)
    brain.serve("ab")
    catch_up(mirror, brain.manager)
    brain.serve("uvwxyz")
    deltas = brain.manager.deltas_since(mirror.position, 100)
    assert deltas.part.last
    mirror.apply(deltas)
    assert mirror.coverage(brain.hashes("uvwxyz"), "replica").cpu == 6


def test_events_out_of_order_are_refused(brain, mirror):
    catch_up(mirror, brain.manager)
    brain.serve("abcd")
    late = brain.manager.deltas_since(Position(1), 100)
    assert not mirror.apply(late)
    assert mirror.coverage(brain.hashes("abcd"), "replica").cpu == 0
    catch_up(mirror, brain.manager)
    assert mirror.coverage(brain.hashes("abcd"), "replica").cpu == 4


def test_a_new_manager_is_noticed_whatever_its_numbers(brain, mirror):
    brain.serve("abcd")
    catch_up(mirror, brain.manager)
    heir = KVManager(ManagerConfig(2), epoch=2)
    heir.device_stored("replica", brain.hashes("uv"))
    heir.device_stored("replica", brain.hashes("uvw"))
    heir.device_stored("replica", brain.hashes("uvwx"))
    catch_up(mirror, heir)
    assert mirror.coverage(brain.hashes("abcd"), "replica") == TierHits(0, 0, 0)
    assert mirror.coverage(brain.hashes("uvwx"), "replica") == TierHits(4, 0, 0)


def test_deltas_come_in_pages(brain, mirror):
    catch_up(mirror, brain.manager)
    brain.serve("abcdef")
    page = brain.manager.deltas_since(mirror.position, 2)
    assert (page.first, page.last, len(page.events), page.part, page.more) == (1, 2, 2, None, True)
    with pytest.raises(ValueError, match="limit"):
        brain.manager.deltas_since(Position(0), 0)


def test_more_mirrors_than_are_told_at_once_wait_and_each_becomes_whole(monkeypatch):
    monkeypatch.setattr(snapshots, "MOST_TOLD", 16)
    manager = KVManager(ManagerConfig(1), epoch=1)
    blocks = [number.to_bytes(32, "big") for number in range(4 * HASHES_PER_EVENT)]
    manager.device_stored("replica", blocks)
    mirrors = [PlacementMirror(1) for _ in range(2 * snapshots.MOST_AT_ONCE)]
    answers = 0
    for _ in range(100):
        for mirror in mirrors:
            if mirror.position.seq < 0 or mirror.position.snapshot_id:
                deltas = manager.deltas_since(mirror.position, 100)
                answers += not deltas.waits
                assert mirror.apply(deltas)
    assert {mirror.coverage(blocks, "replica").device for mirror in mirrors} == {len(blocks)}
    assert answers == 4 * len(mirrors), "no part was told in vain"


def test_a_mirror_that_waits_keeps_its_view_and_one_that_is_gone_takes_no_turn(brain_with):
    brain = brain_with(max_deltas=2)
    mirror = PlacementMirror(2)
    brain.serve("ab")
    catch_up(mirror, brain.manager)
    brain.manager.device_stored("replica", [number.to_bytes(32, "big") for number in range(10_000)])
    brain.serve("uvwxyz")
    for _ in range(snapshots.MOST_AT_ONCE):
        assert brain.manager.deltas_since(NOTHING_SEEN, 1).part.number == 0
    waits = brain.manager.deltas_since(mirror.position, 1)
    assert (waits.waits, waits.more, waits.part, waits.events) == (True, True, None, [])
    assert mirror.apply(waits)
    assert mirror.coverage(brain.hashes("ab"), "replica").cpu == 2
    brain.manager.expire(snapshots.IDLE_S)
    assert not brain.manager.deltas_since(mirror.position, 1).waits
    catch_up(mirror, brain.manager)
    assert mirror.coverage(brain.hashes("uvwxyz"), "replica").cpu == 6


def test_to_begin_a_snapshot_copies_the_blocks_of_one_replica_at_most():
    def memory_of_first_part(replicas: int) -> int:
        manager = KVManager(ManagerConfig(1, max_deltas=1), epoch=1)
        for replica in range(replicas):
            manager.device_stored(str(replica), [number.to_bytes(32, "big") for number in range(10_000)])
        tracemalloc.start()
        manager.deltas_since(NOTHING_SEEN, 1)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert memory_of_first_part(8) < 2 * memory_of_first_part(1)
