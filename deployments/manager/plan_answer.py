"""From the brain's plan to its one form outside: `deployments.protocol.kv_port.PlanDict`."""

from __future__ import annotations

from collections.abc import Iterable

from deployments.protocol.kv_port import (
    PlanDict,
    PlanExpectation,
    PlannedBlend,
    PlannedChunk,
    PlannedLoad,
    PlannedSparse,
)
from kvmanager.loading.load_choice import PromptChoice
from kvmanager.moves.plans import Plan, PlannedSegment


def planned_loads(segments: Iterable[PlannedSegment]) -> list[PlannedLoad]:
    """The segments as a replica loads them."""
    return [
        PlannedLoad(
            s.key,
            s.start_block,
            s.num_blocks,
            s.location.tier.value,
            s.location.holder,
            s.nbytes,
            s.raw_nbytes,
            s.used_blocks,
            s.last_hash,
        )
        for s in segments
    ]


def plan_answer(plan: Plan, epoch: int, choice: PromptChoice, short_tokens: int) -> PlanDict:
    """The plan as a replica hears of it, with what was expected when it was chosen."""
    expected = PlanExpectation(
        load_s=choice.load_s,
        recompute_s=choice.recompute_s,
        deadline_s=choice.deadline_s,
        device_tokens=choice.device_tokens,
        short_tokens=short_tokens,
    )
    answer = PlanDict(
        lease_id=plan.lease_id,
        segments=[] if plan.kept is not None else planned_loads(plan.segments),
        scores=list(plan.scores),
        now=plan.now_score,
        epoch=epoch,
        reason=plan.reason.value,
        expected=expected,
    )
    if plan.kept is not None:
        answer["sparse"] = PlannedSparse(
            blocks=plan.segments[-1].end_block,
            loads=planned_loads(plan.segments),
            kept=[list(counts) for counts in plan.kept.kept],
            forms=list(plan.kept.forms),
            digest=plan.kept.digest,
        )
    if plan.chunks and choice.blend is not None:
        answer["blend"] = PlannedBlend(
            chunks=[PlannedChunk(chunk.start_token, planned_loads(chunk.segments)) for chunk in plan.chunks],
            ratio=choice.blend.ratio,
            check_layer=choice.blend.terms.check_layer,
            seconds=choice.blend_s,
        )
    return answer
