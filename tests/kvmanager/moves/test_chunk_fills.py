"""A chunk with which a replica has ended is not begun again for a while, whether or not it left words."""

from kvmanager.moves import chunk_fills
from kvmanager.moves.chunk_fills import ChunkFills


def test_one_replica_at_a_time_fills_a_chunk():
    fills = ChunkFills(600.0)
    assert fills.begin(0, "r1", b"a")
    assert not fills.begin(1, "r2", b"a")
    fills.end("r2", b"a")
    assert not fills.begin(2, "r2", b"a"), "only who fills it ends it"
    fills.end("r1", b"a")
    assert fills.begin(3, "r2", b"a")


def test_what_was_open_when_a_replica_went_is_refused_for_a_while():
    fills = ChunkFills(600.0)
    for replica, chunk in (("r1", b"a"), ("r1", b"b"), ("r2", b"c"), ("r1", b"done")):
        assert fills.begin(0, replica, chunk)
    fills.end("r1", b"done")
    assert fills.forget_replica(10, "r1") == [b"a", b"b"]
    assert [bool(fills.begin(20, "r3", chunk)) for chunk in (b"a", b"b", b"c", b"done")] == [False, False, False, True]
    assert fills.forget_replica(21, "r1") == []
    assert fills.begin(610, "r3", b"a")


def test_last_words_blame_what_they_name():
    fills = ChunkFills(600.0)
    for chunk in (b"a", b"b"):
        fills.begin(0, "r1", chunk)
    assert fills.forget_replica(1, "r1", [b"b", b"x"]) == [b"b"]
    assert fills.begin(2, "r2", b"a")
    assert not fills.begin(2, "r2", b"b")


def test_no_more_are_remembered_than_may_be(monkeypatch):
    monkeypatch.setattr(chunk_fills, "MOST", 2)
    fills = ChunkFills(600.0)
    for number in range(3):
        fills.begin(number, f"r{number}", bytes([number]))
        fills.forget_replica(number, f"r{number}")
    assert [bool(fills.begin(9, "r", bytes([number]))) for number in range(3)] == [True, False, False]


def test_a_fill_whose_end_nobody_told_ends_by_its_deadline_and_nobody_is_blamed():
    fills = ChunkFills(600.0, fill_s=10.0)
    assert fills.begin(0, "r1", b"a")
    assert not fills.begin(9, "r2", b"a")
    assert fills.begin(10, "r2", b"a")
    fills.end("r1", b"a")
    assert not fills.begin(11, "r3", b"a"), "r2 fills it"
    assert fills.begin(11, "r1", b"b")
    assert fills.forget_replica(21, "r1") == []
    assert fills.begin(22, "r3", b"b")


def test_who_has_not_heard_its_number_ends_its_fill_and_an_old_number_ends_no_new_one():
    fills = ChunkFills(600.0)
    old = fills.begin(0, "r1", b"a")
    fills.end("r1", b"a")
    new = fills.begin(1, "r1", b"a")
    fills.end("r1", b"a", old)
    assert not fills.begin(2, "r2", b"a")
    fills.end("r1", b"a", new)
    other = fills.begin(3, "r2", b"a")
    assert len({0, old, new, other}) == 4


def test_another_managers_numbers_are_others():
    assert not {ChunkFills(600.0, epoch).begin(0, "r", b"a") for epoch in range(100)} & {
        ChunkFills(600.0, epoch).begin(0, "r", b"a") for epoch in range(100, 200)
    }
