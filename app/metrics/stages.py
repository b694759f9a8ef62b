"""Where the time to a prompt's first token goes, stage by stage: `crosskv_stage_seconds{stage}` and, for those who may
ask, `usage.kv_cache.stages_ms`.

Every stamp is one call of `time.monotonic`. What they come to is computed once for each prompt, when it has ended.
On the ingress's event loop.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from deployments.protocol.stage_stamps import STAGE_STAMPS, StageStamps, stage_seconds, this_clock

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

    from deployments.protocol.wire import KVCacheUsage

ANSWER = "answer"
STAGES = (
    "parse", "render", "tokenize", "check", "hash", "turn", "route", "handle", "plan", "queue", "load", "step",
    "output", "back", ANSWER,
)  # fmt: skip
"""In the order in which a prompt passes them; docs/concepts/timeline.md says what each is."""


class RequestStages:
    """The laps of one prompt. One after the other, but for `tokenize`, which runs inside `render`."""

    __slots__ = ("_last", "lapped", "seconds", "usage")

    def __init__(self, began: float, seconds: dict[str, float] | None = None) -> None:
        self._last = self.lapped = began
        """When the last lap ended; of a prompt that is on its way, when it was sent."""
        self.seconds = seconds if seconds is not None else {}
        self.usage: KVCacheUsage | None = None
        """Where the prompt's KV came from, once it has ended."""

    def copy(self) -> RequestStages:
        """Return the stages for one more prompt of the same HTTP request, with the stages so far."""
        return RequestStages(self._last, dict(self.seconds))

    def lap(self, stage: str) -> None:
        """The stage ends now. It began where the one before ended."""
        now = time.monotonic()
        self.seconds[stage] = max(0.0, now - self._last)  # prompts of one request are tokenized side by side
        self._last = self.lapped = now

    def inside_next(self, stage: str, seconds: float) -> None:
        """Count `seconds` of the current lap as a stage of its own."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self._last += seconds

    def replied(self, output: RequestOutput, routed: float, arrived: float) -> None:
        """The replica's own stages, with the last output; `routed`, `arrived`: see `stage_seconds`; 0.0: not known."""
        stamps: StageStamps | None = (output.kv_transfer_params or {}).get(STAGE_STAMPS)
        if stamps is not None and routed:
            self.seconds["route"] = max(0.0, routed - self._last)
            self.seconds |= stage_seconds(stamps, routed, arrived, this_clock())
            self._last = arrived

    def in_ms(self) -> dict[str, float]:
        """In the order of `STAGES`, to a microsecond."""
        return {stage: round(1e3 * self.seconds[stage], 3) for stage in STAGES if stage in self.seconds}
