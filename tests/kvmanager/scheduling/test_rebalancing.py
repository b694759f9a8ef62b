"""Streams leave replicas that are short of KV: which, when, and never so that a target is overfilled or they swing."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.scheduling.rebalancing import (
    AT_ONCE,
    LEAST_TO_COME,
    MOST_MOVES,
    ROOM_SHARE,
    SETTLE_S,
    SHORT_REPORTS,
    SHORT_SHARE,
    STAY_S,
    KVReport,
    LiveStream,
    Rebalancing,
    StreamMove,
    to_come,
)

BLOCK = 32
REPORT_S = 2.0


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


@dataclass
class World:
    """Replicas whose pools hold what the streams there have, and a policy that is asked after each report."""

    pools: dict[str, int]
    streams: dict[str, LiveStream]
    now: float = 1000.0
    moved: list[tuple[float, StreamMove]] = field(default_factory=list)
    policy: Rebalancing = field(default_factory=lambda: Rebalancing(BLOCK))

    def held(self, replica: str) -> int:
        return sum(blocks(one.tokens) for one in self.streams.values() if one.replica == replica)

    def reports(self) -> dict[str, KVReport]:
        """What does not fit is preempted, and wanted."""
        found = {}
        for name, pool in self.pools.items():
            asked, held = self.held(name), 0
            for one in self.streams.values():
                if one.replica == name and held + blocks(one.tokens) <= pool:
                    held += blocks(one.tokens)
            found[name] = KVReport(self.now, pool, held, asked - held)
        return found

    def turn(self) -> list[StreamMove]:
        self.now += REPORT_S
        before = {name: self.held(name) for name in self.pools}
        moves = self.policy.decide(self.now, self.reports(), self.streams.values)
        for move in moves:
            stream, target = move.stream, move.target
            assert self.streams[stream.name] is stream
            assert target != stream.replica
            after = before[target] + blocks(stream.tokens + stream.to_come)
            assert after <= ROOM_SHARE * self.pools[target], "it stays below the mark, with all that is expected"
            assert before[stream.replica] >= SHORT_SHARE * self.pools[stream.replica]
            self.streams[stream.name] = replace(stream, replica=target, since=self.now, moves=stream.moves + 1)
        self.moved += [(self.now, move) for move in moves]
        return moves

    def turns(self, number: int) -> list[StreamMove]:
        return [move for _ in range(number) for move in self.turn()]


def world(pools: dict[str, int], *streams: LiveStream) -> World:
    return World(pools, {stream.name: stream for stream in streams})


def stream(name: str, replica: str, tokens: int, to_come: int = 100, **more: object) -> LiveStream:
    return LiveStream(name, replica, tokens - 1, 1, to_come, since=0.0, **more)  # type: ignore[arg-type]


FULL = (stream("small", "a", 20 * BLOCK), stream("long", "a", 50 * BLOCK), stream("middle", "a", 25 * BLOCK))


def test_the_longest_stream_of_a_short_replica_goes_where_most_room_is_after_some_reports() -> None:
    it = world({"a": 100, "b": 100, "c": 100}, *FULL, stream("other", "b", 10 * BLOCK))
    assert it.turns(SHORT_REPORTS - 1) == []
    (move,) = it.turn()
    assert (move.stream.name, move.target) == ("long", "c")
    assert it.turns(50) == [], "it is short no more"


def test_a_report_that_is_heard_again_counts_once() -> None:
    it = world({"a": 100, "b": 100}, *FULL)
    reports = it.reports()
    for _ in range(3 * SHORT_REPORTS):
        assert it.policy.decide(it.now, reports, it.streams.values) == []


def test_one_good_report_in_between_begins_anew() -> None:
    it = world({"a": 100, "b": 100}, *FULL)
    it.turns(SHORT_REPORTS - 1)
    kept = it.streams.pop("middle")
    assert it.turn() == []
    it.streams["middle"] = kept
    assert it.turns(SHORT_REPORTS - 1) == []
    assert len(it.turn()) == 1


def test_what_waits_for_room_counts_like_what_is_held() -> None:
    it = world({"a": 100, "b": 100}, stream("one", "a", 60 * BLOCK), stream("preempted", "a", 45 * BLOCK))
    (move,) = it.turns(SHORT_REPORTS)
    assert move.stream.name == "one"


def test_where_the_longest_does_not_fit_a_shorter_one_goes() -> None:
    it = world({"a": 100, "b": 100}, *FULL, stream("there", "b", 44 * BLOCK))
    (move,) = it.turns(SHORT_REPORTS)
    assert move.stream.name == "small", "with what is expected the next longer one would pass the mark"


@pytest.mark.parametrize(
    "stays",
    [
        stream("x", "a", 95 * BLOCK // 2, movable=False),
        stream("x", "a", 95 * BLOCK // 2, to_come=LEAST_TO_COME - 1),
        stream("x", "a", 95 * BLOCK // 2, moves=MOST_MOVES),
        replace(stream("x", "a", 95 * BLOCK // 2, moves=1), since=1000.0 + SHORT_REPORTS * REPORT_S - STAY_S + 0.1),
        replace(stream("x", "a", 95 * BLOCK // 2), prompt_tokens=95 * BLOCK // 2, answered=0),
        stream("x", "a", 95 * BLOCK // 2, to_come=100 * BLOCK),
    ],
    ids=["cannot be moved", "ends soon", "moved often", "moved lately", "has no token", "would not fit"],
)
def test_some_streams_stay(stays: LiveStream) -> None:
    it = world({"a": 100, "b": 200}, stays, replace(stays, name="y"))
    it.pools["b"] = 100
    assert it.turns(SHORT_REPORTS) == []


def test_a_replica_takes_one_stream_and_the_next_when_its_report_counts_it() -> None:
    halves = [stream(f"{name}{number}", name, 19 * BLOCK) for name in "ab" for number in range(5)]
    it = world({"a": 100, "b": 100, "c": 200}, *halves)
    assert len(it.turns(SHORT_REPORTS)) == 1
    first = it.now
    assert len(it.turns(30)) >= 1
    assert it.moved[1][0] >= first + SETTLE_S
    assert {move.stream.replica for _, move in it.moved[:2]} == {"a", "b"}


def test_prompts_without_a_token_are_room_that_is_taken() -> None:
    waiting = replace(stream("new", "b", 60 * BLOCK), prompt_tokens=60 * BLOCK, answered=0)
    it = world({"a": 100, "b": 100}, *FULL, waiting)
    reports = {**it.reports(), "b": KVReport(0.0, 100, 0)}
    for turn in range(SHORT_REPORTS):
        reports["a"] = replace(reports["a"], at=float(turn))
        moves = it.policy.decide(it.now, reports, it.streams.values)
    assert moves == []


def test_a_replica_that_is_short_takes_none_and_one_that_has_left_begins_anew() -> None:
    it = world({"a": 100, "b": 100}, *FULL, *(replace(one, name=f"b{one.name}", replica="b") for one in FULL))
    assert it.turns(20) == []
    pool = it.pools.pop("a")
    it.streams = {one.name: one for one in FULL}
    assert it.turn() == []
    it.pools["a"] = pool
    assert it.turns(SHORT_REPORTS - 1) == []
    assert len(it.turn()) == 1


def test_a_replica_whose_queue_waits_for_room_takes_none() -> None:
    it = world({"a": 100, "b": 100}, *FULL)
    for turn in range(SHORT_REPORTS):
        reports = {**it.reports(), "b": KVReport(0.0, 100, 10, wanted=40)}
        reports["a"] = replace(reports["a"], at=float(turn))
        assert it.policy.decide(it.now, reports, it.streams.values) == []


def test_few_streams_move_at_once_however_many_replicas_are_short() -> None:
    sources = [replace(one, name=f"{name}{one.name}", replica=name) for name in "abcd" for one in FULL]
    it = world(dict.fromkeys("abcdefgh", 100), *sources)
    assert len(it.turns(SHORT_REPORTS)) == AT_ONCE
    assert len(it.turn()) == AT_ONCE, "the others' turn"


def test_a_stream_goes_to_replicas_that_take_its_phase_only() -> None:
    it = world({"a": 100, "b": 100, "c": 90}, *(replace(one, phase="decode") for one in FULL))
    for _ in range(SHORT_REPORTS):
        it.now += REPORT_S
        moves = it.policy.decide(
            it.now, it.reports(), it.streams.values, lambda name, phase: (name, phase) == ("c", "decode")
        )
    assert [move.target for move in moves] == ["c"]


def test_nobody_asks_for_the_streams_while_no_replica_is_short() -> None:
    policy = Rebalancing(BLOCK)

    def asked() -> list[LiveStream]:
        raise AssertionError("dear, and not needed")

    for turn in range(10):
        assert policy.decide(turn, {"a": KVReport(turn, 100, 80), "b": KVReport(turn, 100, 0)}, asked) == []


@pytest.mark.parametrize(
    ("predicted", "answered", "most", "left"),
    [(200, 50, 1000, 150), (200, 300, 1000, 300), (200, 300, 400, 100), (None, 0, 1000, 256), (10_000, 0, 300, 300)],
)
def test_how_much_is_to_come(predicted: int | None, answered: int, most: int, left: int) -> None:
    assert to_come(predicted, answered, most) == left


NAMES = st.sampled_from("abcd")
STREAMS = st.lists(
    st.tuples(NAMES, st.integers(1, 60 * BLOCK), st.integers(1, 40 * BLOCK), st.booleans()), min_size=1, max_size=14
)


def any_world(found: list[tuple[str, int, int, bool]], pools: list[int]) -> World:
    return world(
        dict(zip("abcd", pools, strict=True)),
        *(
            stream(str(number), replica, tokens, to_come, movable=movable)
            for number, (replica, tokens, to_come, movable) in enumerate(found)
        ),
    )


POOLS = st.lists(st.integers(40, 200), min_size=4, max_size=4)


@given(STREAMS, POOLS)
def test_while_the_load_stays_no_stream_moves_twice_and_none_comes_back(
    found: list[tuple[str, int, int, bool]], pools: list[int]
) -> None:
    it = any_world(found, pools)
    it.turns(80)
    assert not [name for name, times in Counter(move.stream.name for _, move in it.moved).items() if times > 1]
    received: set[str] = set()
    for _, move in it.moved:
        assert move.stream.replica not in received, "who had room is never short"
        received.add(move.target)
    assert it.turns(40) == [], "it comes to rest"


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 13), st.integers(1, 20 * BLOCK)),
        st.tuples(st.just("end"), st.integers(0, 13), st.just(0)),
        st.tuples(st.just("arrive"), NAMES, st.integers(1, 60 * BLOCK)),
        st.tuples(st.just("wait"), st.integers(1, 12), st.just(0)),
    ),
    max_size=60,
)


@given(STREAMS, POOLS, CHANGES)
def test_whatever_changes_moves_are_bounded_and_no_target_is_overfilled(
    found: list[tuple[str, int, int, bool]], pools: list[int], changes: list[tuple[str, object, int]]
) -> None:
    """`World.turn` holds the marks at each move; streams grow and end here, and others arrive."""
    it, arrived = any_world(found, pools), 0
    for what, which, amount in changes:
        name = str(which)
        if what == "grow" and name in it.streams:
            grown = it.streams[name]
            it.streams[name] = replace(grown, answered=grown.answered + amount, to_come=max(1, grown.to_come - amount))
        elif what == "end":
            it.streams.pop(name, None)
        elif what == "arrive":
            arrived += 1
            it.streams[f"new{arrived}"] = stream(f"new{arrived}", name, amount)
        for _ in range(int(name) if what == "wait" else 1):
            assert len(it.turn()) <= AT_ONCE
    at: defaultdict[str, list[float]] = defaultdict(list)
    taken: defaultdict[str, list[float]] = defaultdict(list)
    given_by: defaultdict[str, list[float]] = defaultdict(list)
    for now, move in it.moved:
        assert move.stream.movable
        at[move.stream.name].append(now)
        taken[move.target].append(now)
        given_by[move.stream.replica].append(now)
    assert all(len(times) <= MOST_MOVES for times in at.values())
    for times, least in ((at, STAY_S), (taken, SETTLE_S), (given_by, SHORT_REPORTS * REPORT_S)):
        assert all(later - now >= least for each in times.values() for now, later in pairwise(each))
