"""When a prompt passed which point at its replica: the ingress says by it where the time to the first token went.

Stamps are seconds of `time.monotonic`. On Linux that is one clock for all processes of one running system, so stamps of
two processes can be subtracted if `clock` is the same. Where it is not, the replica is on another node: then only spans
within one process are used (`stage_seconds`).
"""

from __future__ import annotations

import functools
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import RequestStateStats

STAGE_STAMPS = "crosskv_stage_stamps"
"""Key of `StageStamps` in `RequestOutput.kv_transfer_params` of a prompt's last output."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class StageStamps(NamedTuple):
    """0.0: it did not happen, or was not recorded."""

    clock: str
    """Which clock: `this_clock` of the replica."""
    received: float
    """The replica's method ran."""
    planned: float
    """It had a plan, or knew that there is none."""
    load_began: float = 0.0
    load_ended: float = 0.0
    scheduled: float = 0.0
    """The engine began to compute the prompt: after an asynchronous load, before one that comes layer by layer."""
    first_token: float = 0.0
    """The engine had it."""
    yielded: float = 0.0
    """The replica handed the first output to its caller."""

    @classmethod
    def of(
        cls,
        received: float,
        planned: float,
        yielded: float,
        load: tuple[float, float] | None,
        engine: RequestStateStats | None,
    ) -> StageStamps:
        """`load`: when it began and ended, None for none; `engine`: `RequestOutput.metrics`, on the same clock."""
        began, ended = load or (0.0, 0.0)
        scheduled, first = (engine.scheduled_ts, engine.first_token_ts) if engine is not None else (0.0, 0.0)
        return cls(this_clock(), received, planned, began, ended, scheduled, first, yielded)


@functools.cache
def this_clock() -> str:
    """Names the clock of `time.monotonic` here: equal names are one clock."""
    try:
        return _BOOT_ID.read_text(encoding="utf-8").strip()
    except OSError:  # not Linux: at least another machine's is another one
        return socket.gethostname()


def stage_seconds(stamps: StageStamps, routed: float, arrived: float, clock: str) -> dict[str, float]:
    """Seconds by stage, from the router's choice of a replica, `routed`, to its first output's arrival, `arrived`.

    Both are stamps of the caller's `clock`. The stages add up to `arrived - routed`. On another clock the way back
    cannot be told from the way there: `handle` is both. A load that comes layer by layer is a part of `step`.
    """
    asynchronous = stamps.load_ended > 0 and (not stamps.scheduled or stamps.load_ended <= stamps.scheduled)
    load = max(0.0, stamps.load_ended - stamps.load_began) if asynchronous else 0.0
    scheduled = stamps.scheduled or stamps.planned + load
    first_token = stamps.first_token or stamps.yielded
    found = {
        "plan": stamps.planned - stamps.received,
        "queue": scheduled - stamps.planned - load,
        "load": load,
        "step": first_token - scheduled,
        "output": stamps.yielded - first_token,
    }
    if clock == stamps.clock:
        found |= {"handle": stamps.received - routed, "back": arrived - stamps.yielded}
    else:
        found["handle"] = (arrived - routed) - (stamps.yielded - stamps.received)
    return {stage: max(0.0, seconds) for stage, seconds in found.items()}
