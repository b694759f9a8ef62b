"""One blend at a time, in order, a slice between two steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from deployments.engine.load_paths.blending import queue as queue_module
from deployments.engine.load_paths.blending.queue import LONGEST_SLICE_S, SLICE_S, BlendQueue


class Fake:
    """Needs some turns; a turn that is None waits."""

    def __init__(self, request_id: str, turns: list[bool | None], log: list[str], blocks: int = 1) -> None:
        self.request_id = request_id
        self.blocks = blocks
        self.turns = turns
        self.log = log
        self.cancelled = False
        self.vain_s = 0.0
        self.patience_s = 10.0

    def advance(self, until: float) -> bool | None:
        if self.cancelled or self.patience_s <= 0:
            self.log.append(f"{self.request_id} {'cancelled' if self.cancelled else 'given up'}")
            return False
        self.log.append(self.request_id)
        return self.turns.pop(0)

    def waited(self, seconds: float) -> bool:
        self.patience_s -= seconds
        return self.patience_s <= 0

    def cancel(self) -> None:
        self.cancelled = True


class Engine:
    """Runs what was called between two steps; what these call waits for the next step."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def step(self) -> int:
        now, self.waiting = self.waiting, []
        for call in now:
            call()
        return len(now)


def test_one_is_made_after_the_other_and_each_slice_is_a_call_of_its_own() -> None:
    engine, log = Engine(), list[str]()
    queue = BlendQueue(lambda call: engine.waiting.append(call), 5, 100)
    queue.put(Fake("a", [True, True, False], log))
    queue.put(Fake("b", [False], log))
    calls = []
    while ran := engine.step():
        calls.append(ran)
    assert log == ["a", "a", "a", "b"]
    assert calls == [1, 1, 1, 1]


def test_a_slice_takes_no_more_than_who_decodes_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slices, most = SimpleNamespace(now=100.0), list[float](), list[float | None]([0.01, 5.0, None])
    monkeypatch.setattr(queue_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    class Timed(Fake):
        def advance(self, until: float) -> bool | None:
            slices.append(until - clock.now)
            return super().advance(until)

    engine = Engine()
    queue = BlendQueue(lambda call: engine.waiting.append(call), 5, 100, lambda: most.pop(0))
    queue.put(Timed("a", [True, True, False], []))
    while engine.step():
        pass
    assert slices == pytest.approx([0.01, SLICE_S, SLICE_S])


def test_a_slice_is_as_long_as_the_step_before_it_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slices = SimpleNamespace(now=100.0), list[float]()
    monkeypatch.setattr(queue_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    class Timed(Fake):
        def advance(self, until: float) -> bool | None:
            slices.append(until - clock.now)
            clock.now = until
            return super().advance(until)

    engine = Engine()
    queue = BlendQueue(lambda call: engine.waiting.append(call), 5, 100)
    queue.put(Timed("a", [True, True, True, True, None, False], []))
    for step_s in (0.0, 0.3, 0.001, 7.0, 0.5):
        clock.now += step_s
        engine.step()
    clock.now += 60.0  # while it waited for bytes, the time was nobody's
    queue.poke()
    engine.step()
    assert slices == pytest.approx([SLICE_S, 0.3, SLICE_S, LONGEST_SLICE_S, 0.5, SLICE_S])


def test_one_that_waits_is_not_asked_before_it_is_poked_and_nobody_overtakes_it() -> None:
    engine, log = Engine(), list[str]()
    queue = BlendQueue(lambda call: engine.waiting.append(call), 5, 100)
    queue.put(Fake("a", [None, False], log))
    queue.put(Fake("b", [False], log))
    assert engine.step() == 1
    assert engine.step() == 0
    queue.poke()
    queue.poke()
    while engine.step():
        pass
    assert log == ["a", "a", "b"]


def test_one_that_waits_in_the_queue_leaves_it_when_it_is_cancelled() -> None:
    engine, log = Engine(), list[str]()
    queue = BlendQueue(lambda call: engine.waiting.append(call), 1, 100)
    queue.put(Fake("a", [None, False], log))
    assert queue.has_room(1)
    queue.put(Fake("b", [False], log))
    assert not queue.has_room(1)
    engine.step()
    queue.cancel("b")
    queue.cancel("nobody")
    assert queue.has_room(1)
    assert log == ["a", "b cancelled"]


def test_the_first_one_ends_at_its_next_slice_when_it_is_cancelled() -> None:
    engine, log = Engine(), list[str]()
    queue = BlendQueue(lambda call: engine.waiting.append(call), 1, 100)
    queue.put(Fake("a", [None], log))
    engine.step()
    queue.cancel("a")
    while engine.step():
        pass
    assert log == ["a", "a cancelled"]


def test_what_the_first_one_has_waited_in_vain_those_behind_it_have_waited_too() -> None:
    engine, log = Engine(), list[str]()
    queue = BlendQueue(lambda call: engine.waiting.append(call), 5, 100)
    first, *others = [Fake(name, [None, True, False], log) for name in "abcd"]
    first.turns = [None, True, True, False]
    for blend, patience_s in zip((first, *others), (9.0, 3.0, 5.0, 9.0), strict=True):
        blend.patience_s = patience_s
        queue.put(blend)
    engine.step()
    queue.poke()
    first.vain_s = 3.0
    engine.step()
    assert log == ["a", "a", "b given up"], "at once, and not when the first one has been made"
    engine.step()
    assert others[1].patience_s == 2.0, "it hears of it once"
    first.vain_s = 4.0
    engine.step()
    assert log[3:] == ["a", "a"]
    others[1].vain_s, others[1].turns = 1.0, [False]
    engine.step()
    assert (others[1].patience_s, others[2].patience_s) == (1.0, 4.0), "of each what it has waited itself"


def test_those_that_wait_hold_no_more_blocks_than_they_may_but_one_always_goes() -> None:
    queue = BlendQueue(lambda call: None, 5, 10)
    assert queue.has_room(11)
    queue.put(Fake("a", [], [], blocks=7))
    assert queue.has_room(3)
    assert not queue.has_room(4)
