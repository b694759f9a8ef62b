"""A request's plan for blending, and whether the request may be blended at all. On the engine thread.

Leans on vLLM: `Request.sampling_params`, `skip_reading_prefix_cache`, `prompt_embeds`, `mm_features`, `lora_request`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deployments.engine.load_paths.blending.chunk_load import reused_end
from kvmanager.extensions.blend.chunks import PlannedBlend, PlannedChunk
from kvmanager.moves.plan import PlanExpectation
from kvmanager.segments.keys import BLENDED

if TYPE_CHECKING:
    from vllm.v1.request import Request

FIDELITY = "fidelity"
"""The prompt wants no blended KV. The ingress sends no such plan, and the manager makes none."""
REQUEST = "request"
"""It asks for something that only computing its whole prompt gives, or is more than tokens."""


TAIL_TOKENS = 256
"""Of what follows the last chunk, such as the question. It is computed either way, but in slices a neighbour's next
token does not wait for all of it: a 365M model on one core takes a quarter of a second for 100 tokens."""


UNKNOWN_GAIN_S = 1.0
"""How much sooner than computing a blend is taken to be before prefills and blends have been measured."""


@dataclass(slots=True)
class RequestBlend:
    """A plan's blend, as it is read once: `kvmanager.extensions.blend.chunks.PlannedBlend`."""

    chunks: Sequence[PlannedChunk]
    ratio: float
    check_layer: int
    seconds: float
    timeout_s: float = 0.0
    """How long it may wait for room before its prompt is computed."""
    wait_ends: float | None = None
    """On `time.monotonic`'s clock, once it has begun to wait."""

    @classmethod
    def read(cls, planned: PlannedBlend, expected: PlanExpectation) -> RequestBlend:
        """From a plan, with bounds for what a blend can be."""
        ratio = min(1.0, max(0.0, planned.ratio))
        timeout_s = UNKNOWN_GAIN_S
        if expected.recompute_s:
            timeout_s = max(0.0, expected.recompute_s - expected.load_s)
        return cls(planned.chunks, ratio, max(1, planned.check_layer), planned.seconds, timeout_s)

    def goes_on_waiting(self, now: float) -> bool:
        """Whether it waits for room at `now`: no longer than it is sooner than computing, else nothing is gained."""
        if self.wait_ends is None:
            self.wait_ends = now + self.timeout_s
        return now < self.wait_ends

    def end_block(self, first_token: int, most_blocks: int, block_size: int) -> int:
        """The block up to which a blend that begins at `first_token` goes: behind it only vLLM computes. 0: nothing.

        A chunk that ends before is of no use. What follows the last one is taken along, up to `TAIL_TOKENS`.
        """
        end = reused_end(self.chunks, block_size)
        return min((end + TAIL_TOKENS) // block_size, most_blocks) if end > first_token else 0


def why_refused(request: Request, fidelity: str) -> str | None:
    """`FIDELITY` or `REQUEST`; None: it may be blended."""
    if fidelity != BLENDED:
        return FIDELITY
    params = request.sampling_params
    if (
        params is None
        or params.prompt_logprobs is not None
        or request.skip_reading_prefix_cache
        or request.prompt_embeds is not None
        or request.mm_features
        or request.lora_request is not None
    ):
        return REQUEST
    return None
