"""The engine thread's heartbeat, and who listens: an engine that hangs without dying is found and given up.

`Heartbeat` is written by the engine thread at the begin and the end of whatever it does, a *turn*: a step, or a call
between two steps. `HangWatch` is a thread that looks every `LOOK_EVERY_S`. A turn may take

    slack                                  a call, and the planning of a step
    slack + PATIENCE · expected time       a step, by `kvmanager.loading.step_pace`, at most as the next
    slack + UNKNOWN_S                      a step while nothing is known yet, and one in which torch compiles

and, if the step waits for layerwise loads, as long as the longest of them may take. It is a hang beyond. A step's time
is counted by what the watch itself could see of it, so a process that was stopped, or a machine that stood still, ages
no step by more than one look. What the watch cannot see, a process that is stopped or a hang that holds Python's lock,
is found by Serve, whose health check is not answered then.

Leans on torch 2.13.0's `torch._dynamo.callback.callback_handler`, which tells when a compilation begins and ends: the
first request of a kind may have half a minute of it inside its step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvmanager.loading.step_pace import StepPace, StepWork

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
PATIENCE = 4.0
"""A step that takes so many times the slowest that was measured is still taken for a slow one."""
UNKNOWN_S = 600.0


class Heartbeat:
    """See the module's docstring. `turn`, `scheduled` and `may_wait` on the engine thread; the rest from any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        """Grows when a turn begins and when it ends: odd during one."""
        self.work: StepWork | None = None
        """Of the step that is being computed."""
        self.compiling = False
        self._compiled = False
        self._waits_s = 0.0
        self._clock = clock
        self._pace = StepPace()
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Around whatever the engine thread does. A step's time is learned, unless it fails, compiles or waits."""
        self.work, self._compiled, self._waits_s = None, False, 0.0
        began = self._clock()
        self.count += 1
        try:
            yield
            if self.work is not None and not self._compiled and not self._waits_s:
                with self._lock:
                    self._pace.took(self.work, self._clock() - began)
        finally:
            self.count += 1

    def scheduled(self, work: StepWork) -> None:
        """What this turn's step computes is known now."""
        self.work = work

    def may_wait(self, seconds: float) -> None:
        """This turn's step may wait so long for a load. Several are waited for at once."""
        self._waits_s = max(self._waits_s, seconds)

    def patience_s(self, slack_s: float) -> float:
        """How long the present turn may take."""
        work = self.work
        slack_s += self._waits_s
        if self.compiling:
            return slack_s + UNKNOWN_S
        if work is None:
            return slack_s
        with self._lock:
            expected = self._pace.expected_s(work)
        return slack_s + (UNKNOWN_S if expected is None else min(UNKNOWN_S, PATIENCE * expected))

    def hear_compilation(self) -> Callable[[], None]:
        """Hear of torch's compilations from now on; returns what ends it."""
        from torch._dynamo.callback import callback_handler

        def begins(args: Any) -> None:
            self.compiling = self._compiled = True

        def ends(args: Any) -> None:
            self.compiling = False

        def forget() -> None:
            callback_handler.remove_start_callback(begins)
            callback_handler.remove_end_callback(ends)

        callback_handler.register_start_callback(begins)
        callback_handler.register_end_callback(ends)
        return forget


class HangWatch:
    """See the module's docstring. `on_hang` is called once, on the watch's thread, with what was seen in words."""

    def __init__(self, heartbeat: Heartbeat, slack_s: float, on_hang: Callable[[str], None]) -> None:
        self._heartbeat = heartbeat
        self._slack_s = slack_s
        self._on_hang = on_hang
        self._seen = 0
        self._age_s = 0.0
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
        """What is wrong, if anything. `now` is on any clock that does not go backwards."""
        passed = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        count = self._heartbeat.count
        if count != self._seen or not count % 2:
            self._seen, self._age_s = count, 0.0
            return None
        self._age_s += min(passed, 2 * LOOK_EVERY_S)
        patience_s = self._heartbeat.patience_s(self._slack_s)
        if self._age_s <= patience_s or self._heartbeat.count != count:
            return None
        work = self._heartbeat.work
        what = f"a step of {work.tokens} tokens" if work else "a call, or the planning of a step,"
        return f"{what} has not ended after {self._age_s:.1f} s; at most {patience_s:.1f} s were expected"

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_EVERY_S):
            wrong = self.look(time.monotonic())
            if wrong is not None:
                logger.error("the engine hangs: %s", wrong)
                self._on_hang(wrong)
                return
