"""The engine thread's heartbeat and its watch: an engine that hangs without dying is found and given up.

`Heartbeat` writes a `Beat` at the begin and the end of whatever the engine thread does, a *turn*: a step, or a call
between two steps. `HangWatch` is a thread that reads it every `LOOK_EVERY_S`. Where the engine is a process of its own
the beat lies in memory that both share, and the watch is the replica's. A turn may take

    slack                                  a call, and the planning of a step
    slack + HANG_FACTOR · expected time    a step, by `kvmanager.scheduling.step_time`, at most as the next
    slack + UNKNOWN_S                      a step while nothing is known yet, and one in which torch compiles

and, if the step waits for layerwise loads, as long as the longest of them may take. It is a hang beyond. A step's time
is counted by what the watch itself could see of it, so a process that was stopped, or a machine that stood still, ages
no step by more than one look. What a watch in the engine's own process cannot see, that it is stopped or that a hang
holds Python's lock, is found by Serve, whose health check is not answered then. A process of the engine's own shows a
pulse besides, and is given up when it has had none for as long (`STANDSTILL_S`).

Leans on torch 2.13.0's `torch._dynamo.callback.callback_handler`, which tells when a compilation begins and ends: the
first request of a kind may have half a minute of it inside its step.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvmanager.scheduling.step_time import Step, StepEstimate

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
HANG_FACTOR = 4.0
"""A step that takes up to this many times the slowest one measured counts as slow, not as hung."""
UNKNOWN_S = 600.0
STANDSTILL_S = 10.0
"""As long as Serve waits for a replica's health check."""


class Beat(ctypes.Structure):
    """The memory that a watch reads. Written by the engine thread, except `pulse`; each field is written atomically."""

    _fields_ = (
        ("count", ctypes.c_uint64),
        ("tokens", ctypes.c_int64),
        ("expected_s", ctypes.c_double),
        ("waits_s", ctypes.c_double),
        ("compiling", ctypes.c_bool),
        ("pulse", ctypes.c_uint64),
    )
    count: int
    """Grows when a turn begins and when it ends: odd during one."""
    tokens: int
    """Of the step that is being computed; 0: none has been planned in this turn."""
    expected_s: float
    """How long that step is expected to take; negative: nothing is known yet."""
    waits_s: float
    """Seconds that it may also wait for loads."""
    compiling: bool
    pulse: int
    """Grows while the engine's process runs Python; 0: the engine has no process of its own."""

    def allowed_s(self, slack_s: float) -> float:
        """How long the present turn may take."""
        slack_s += self.waits_s
        if self.compiling:
            return slack_s + UNKNOWN_S
        if not self.tokens:
            return slack_s
        return slack_s + (UNKNOWN_S if self.expected_s < 0 else min(UNKNOWN_S, HANG_FACTOR * self.expected_s))


class Heartbeat:
    """See the module's docstring. On the engine thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, beat: Beat | None = None) -> None:
        self.beat = beat or Beat()
        self._work: Step | None = None
        self._compiled = False
        self._clock = clock
        self._estimate = StepEstimate()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around whatever the engine thread does. A step's time is learned, unless it fails, compiles or waits."""
        self._work, self._compiled = None, False
        self.beat.tokens, self.beat.waits_s = 0, 0.0
        began = self._clock()
        self.beat.count += 1
        try:
            yield
            if self._work is not None and not self._compiled and not self.beat.waits_s:
                self._estimate.took(self._work, self._clock() - began)
        finally:
            self.beat.count += 1

    def watch(self, scheduler: Any) -> None:
        """Hear what each step of vLLM's scheduler computes, as soon as it is planned."""
        schedule = scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            planned = schedule(*args, **kwargs)
            running, tokens = planned.scheduled_cached_reqs, planned.num_scheduled_tokens
            work = Step()
            for new in planned.scheduled_new_reqs:
                work = work.plus(tokens[new.req_id], new.num_computed_tokens)
            for request_id, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
                work = work.plus(tokens[request_id], computed)
            if work.tokens:
                self.scheduled(work)
            return planned

        scheduler.schedule = watched

    def scheduled(self, work: Step) -> None:
        """Note what this turn's step computes."""
        self._work = work
        expected = self._estimate.expected_s(work)
        self.beat.expected_s = -1.0 if expected is None else expected
        self.beat.tokens = work.tokens

    def may_wait(self, seconds: float) -> None:
        """Allow this turn's step to wait this long for a load. The waits for several loads overlap."""
        self.beat.waits_s = max(self.beat.waits_s, seconds)

    def hear_compilation(self) -> Callable[[], None]:
        """Hear of torch's compilations from now on; returns what ends it."""
        from torch._dynamo.callback import callback_handler

        def begins(args: Any) -> None:
            self.beat.compiling = self._compiled = True

        def ends(args: Any) -> None:
            self.beat.compiling = False

        def forget() -> None:
            callback_handler.remove_start_callback(begins)
            callback_handler.remove_end_callback(ends)

        callback_handler.register_start_callback(begins)
        callback_handler.register_end_callback(ends)
        return forget


class HangWatch:
    """See the module's docstring. `on_hang` is called once, on the watch's thread, with what was seen in words."""

    standstill_s = STANDSTILL_S

    def __init__(self, beat: Beat, slack_s: float, on_hang: Callable[[str], None]) -> None:
        self._beat = beat
        self._slack_s = slack_s
        self._on_hang = on_hang
        self._count = _Age()
        self._pulse = _Age()
        self._looked_at: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="crosskv-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more. Idempotent; from any thread."""
        self._closed.set()

    def look(self, now: float) -> str | None:
        """Return what is wrong, if anything. `now` is on any clock that does not go backwards."""
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, 2 * LOOK_EVERY_S)
        self._looked_at = now
        beat = self._beat
        stood_s = self._pulse.of(beat.pulse, passed)
        if beat.pulse and stood_s > self.standstill_s:
            return f"the engine's process stands still for {stood_s:.1f} s"
        count = beat.count
        age_s = self._count.of(count, passed)
        if not count % 2 or age_s <= (allowed_s := beat.allowed_s(self._slack_s)) or beat.count != count:
            return None
        what = f"a step of {beat.tokens} tokens" if beat.tokens else "a call, or the planning of a step,"
        return f"{what} has not ended after {age_s:.1f} s; at most {allowed_s:.1f} s were expected"

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            wrong = self.look(time.monotonic())
            if wrong is not None:
                logger.error("the engine hangs: %s", wrong)
                self._on_hang(wrong)
                return


class _Age:
    """For how long a number has been the same, in seconds that were seen to pass."""

    def __init__(self) -> None:
        self._seen = -1
        self._age_s = 0.0

    def of(self, number: int, passed_s: float) -> float:
        """Its age, `passed_s` after the last look."""
        self._age_s = self._age_s + passed_s if number == self._seen else 0.0
        self._seen = number
        return self._age_s
