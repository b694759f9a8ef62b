"""One device serves a trace, request after request; what it had of each. No time, no routing, no other tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from kvmanager.index.hotness import HotnessClock
from load_tests.device_order.devices import Device, Use
from load_tests.simulator.turn_replay import Turn

RUNNING = 4
"""Requests that hold blocks at one time."""


class Found(NamedTuple):
    """What a device had of a trace."""

    hit_share: float
    """Of the prompts' blocks, those found: each prompt's leading ones."""
    next_turn_share: float
    """Of the next turns, those that found all that the turn before had left."""


class Uses:
    """The manager's part: how often each block was used, whatever a device has lost since. Forgets nothing."""

    def __init__(self, half_life_requests: float = 1000.0) -> None:
        self._clock = HotnessClock(half_life_requests)
        self._scores: dict[bytes, float] = {}

    def plan(self, turn: Turn) -> Use:
        """Count a use of what is known of a prompt, and return what its plan says."""
        self._clock.tick()
        scores: list[float] = []
        for name in turn.hashes[: turn.prompt_blocks]:
            known = self._scores.get(name)
            if known is None:
                break
            self._scores[name] = self._clock.used(known)
            scores.append(self._scores[name])
        ends, parts = 0, []
        for score, alike in groupby(scores):
            ends += len(list(alike))
            parts.append((ends, score))
        for name in turn.left[ends:]:
            self._scores.setdefault(name, self._clock.now)
        return Use(parts, self._clock.now)


def replay(turns: Sequence[Turn], device: Device, running: int = RUNNING) -> Found:
    """Serve all turns. Raises ValueError for one that the device cannot hold."""
    uses = Uses()
    active: deque[Turn] = deque()
    hits = blocks = next_turns = found_turns = 0
    for turn in turns:
        found, use = device.found(turn), uses.plan(turn)
        hits += found
        blocks += turn.prompt_blocks
        if turn.previous is not None:
            left = turn.previous.left
            known = next((n for n, (a, b) in enumerate(zip(left, turn.hashes, strict=False)) if a != b), len(left))
            next_turns += 1
            found_turns += found >= min(known, turn.prompt_blocks)
        while len(active) == running:
            device.end(active.popleft())
        while not device.begin(turn, use):
            if not active:
                raise ValueError(f"request {turn.number + 1} needs {len(turn.left)} blocks: give the device more")
            device.end(active.popleft())
        active.append(turn)
    for turn in active:
        device.end(turn)
    return Found(hits / max(1, blocks), found_turns / max(1, next_turns))
