"""Chunks that wait: bounded, and fair between tenants."""

from __future__ import annotations

from deployments.replica.fill_queue import ColdChunk, FillQueue


def chunk(name: str, tenant: str, tokens: int = 10) -> ColdChunk:
    return ColdChunk(range(tokens), [name.encode()], "salt", tenant)


def test_tenants_take_turns_and_the_one_with_most_loses_first() -> None:
    queue = FillQueue(most_chunks=4)
    assert queue.add(chunk("a1", "a")) == []
    assert sum(len(queue.add(chunk(f"b{number}", "b"))) for number in range(5)) == 2
    assert queue.add(chunk("b4", "b")) == [], "it waits already"
    taken = [found.key for _ in range(5) if (found := queue.take())]
    assert taken == [b"a1", b"b2", b"b3", b"b4"]
    assert (len(queue), queue.take()) == (0, None)


def test_tenants_with_several_chunks_each_are_served_in_turn() -> None:
    queue = FillQueue()
    for name, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b")):
        queue.add(chunk(name, tenant))
    taken = [found.key for _ in range(5) if (found := queue.take())]
    assert taken == [b"a1", b"b1", b"a2", b"b2", b"a3"]


def test_many_small_chunks_of_one_tenant_push_out_no_large_one_of_another() -> None:
    queue = FillQueue(most_chunks=4)
    queue.add(chunk("large", "a", 100))
    assert sum(len(queue.add(chunk(f"small{number}", "b", 5))) for number in range(6)) == 3
    assert b"large" in queue


def test_waiting_chunks_have_a_bound_in_tokens_too() -> None:
    queue = FillQueue(most_tokens=100)
    queue.add(chunk("small", "a", 10))
    assert sum(len(queue.add(chunk(f"long{number}", "b", 60))) for number in range(3)) == 2
    assert sorted(found.key for _ in range(2) if (found := queue.take())) == [b"long2", b"small"]
    assert len(queue.add(chunk("whole", "a", 200))) == 1
    assert len(queue) == 0


def test_what_is_no_longer_wanted_leaves_and_the_others_keep_their_order() -> None:
    queue = FillQueue()
    for name, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")):
        queue.add(chunk(name, tenant))
    for name in (b"a2", b"b1", b"nobody's"):
        queue.remove(name)
    assert len(queue) == 2
    assert [found.key for _ in range(3) if (found := queue.take())] == [b"a1", b"a3"]
    assert queue.add(chunk("b1", "b")) == []
