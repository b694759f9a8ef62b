"""What a request tells the engine: unchanged within a process, checked where it has crossed one, copied for nothing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import msgspec
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deployments.protocol.engine_hints import HINTS, NO_HINTS, EngineHints, extra, hints_of
from kvmanager.extensions.blend.chunks import BLEND, PlannedBlend, PlannedChunk
from kvmanager.extensions.sparse.retained_prefixes import SPARSE, PlannedSparse
from kvmanager.index.locations import Tier
from kvmanager.moves.plan import Plan, PlanExpectation, PlannedLoad, PlanReason
from kvmanager.segments.keys import SegmentKey

LOADS = (
    PlannedLoad(SegmentKey(b"a" * 32), 0, 4, Tier.CPU, "node", 1000, 2000),
    PlannedLoad(SegmentKey(b"b" * 32), 4, 4, Tier.REDIS, "", 500, 2000, 2, b"h" * 32),
)
BLENDED = PlannedBlend((PlannedChunk(40, LOADS[:1]),), 0.15, 2, 0.5)
THINNED = PlannedSparse(LOADS, ((1, 2), (2, 2)), (b"form", b""), b"digest")
PLAN = Plan(
    7, LOADS, PlanReason.PARTIAL, ((4, 2.5), (6, 1.5)), 1.0, 3, PlanExpectation(0.1, 0.2, 2.0, 32, 64),
    {BLEND: BLENDED, SPARSE: THINNED},
)  # fmt: skip
ALL = EngineHints(PLAN, "tenant", "tolerant", 1.5, 64, "plain", False, 12, "order-1")


def sent(hints: EngineHints) -> dict[str, Any]:
    """`kv_transfer_params` behind vLLM's way into an engine's process."""
    params = SamplingParams(extra_args={"kv_transfer_params": hints.as_transfer()})
    found: SamplingParams = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params))
    transfer: dict[str, Any] = (found.extra_args or {})["kv_transfer_params"]
    return transfer


def test_all_of_it_comes_out_of_another_process_as_it_was() -> None:
    transfer = sent(ALL)
    found = hints_of(transfer)
    assert found.plan is not None
    assert extra(found.plan, BLEND, PlannedBlend) == BLENDED
    assert extra(found.plan, SPARSE, PlannedSparse) == THINNED
    bare = {"lease_id": 7, "segments": LOADS, "reason": PlanReason.PARTIAL, "expected": PLAN.expected}
    assert {name: getattr(found.plan, name) for name in bare} == bare
    assert found == EngineHints(found.plan, "tenant", "tolerant", 1.5, 64, "plain", False, 12, "order-1")
    assert hints_of(transfer) is found, "it is read once"


def test_within_a_process_it_is_passed_on_and_copied_for_nothing() -> None:
    transfer = ALL.as_transfer()
    assert hints_of(transfer) is ALL
    assert copy.deepcopy(transfer)[HINTS] is ALL
    assert pickle.loads(pickle.dumps(ALL)) == ALL


@pytest.mark.parametrize("transfer", [None, {}, {"other": 1}])
def test_a_request_without_hints_has_the_defaults(transfer: dict[str, Any] | None) -> None:
    assert hints_of(transfer) is NO_HINTS


@pytest.mark.parametrize(
    "wrong",
    [
        {"plan": {"lease_id": "7"}},
        {"plan": {"segments": [[b"a", 0, 4, "tape", "node", 1]]}},
        {"plan": {"segments": [[b"a", 0]]}},
        {"fidelity": "better"},
        "x",
    ],
)
def test_what_has_other_types_is_refused(wrong: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        hints_of({HINTS: wrong})


def test_extras_of_other_types_are_refused_where_they_are_read() -> None:
    plan = Plan(extras={SPARSE: {"loads": 5}})
    with pytest.raises(msgspec.ValidationError):
        extra(plan, SPARSE, PlannedSparse)
    assert extra(plan, BLEND, PlannedBlend) is None
    assert extra(None, BLEND, PlannedBlend) is None
