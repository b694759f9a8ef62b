"""Single decisions of the connector's two halves, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus

from deployments.engine.connector import CrossKVConnector
from deployments.engine.groups import KVGroups
from deployments.engine.load_paths.layerwise import LayerwisePath
from deployments.engine.load_paths.states import StatesPath
from deployments.engine.load_paths.whole import WholePath
from deployments.engine.scheduler_side import SchedulerSide
from deployments.engine.tracked_request import PlannedChain, SaveProgress, TrackedRequest
from deployments.protocol.engine_hints import EngineHints
from deployments.transfer.shared_loads import Awaited, LoadUnderWay
from kvmanager.extensions.states.landings import STATES, PlannedLanding
from kvmanager.moves.plan import Plan, PlannedLoad


class Heard:
    """A `LayerwiseStep` that notes the layers that it hears of."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.computed = 0

    def wait_for_layer(self, layer: int) -> None:
        self.waited.append(layer)

    def layer_computed(self) -> None:
        self.computed += 1


def test_an_attention_layer_that_was_not_registered_is_passed_over() -> None:
    connector: Any = object.__new__(CrossKVConnector)
    heard = connector._layerwise = Heard()
    connector._layer_numbers = {"model.layers.0.self_attn": 0, "model.layers.1.self_attn": 1}
    for name in ("model.layers.0.self_attn", "vision.layers.0.attn", "model.layers.1.self_attn"):
        connector.wait_for_layer_load(name)
        connector.save_kv_layer(name, None, None)
    assert heard.waited == [0, 1]
    assert heard.computed == 2, "a save that follows the step layer by layer counts the cache's own layers"


@pytest.mark.parametrize(
    "group_of", [{"model.layers.0.attn": 0, "model.layers.1.attn": 1}, {}], ids=["known", "unknown"]
)
def test_a_layer_that_attends_to_another_ones_kv_has_none_to_move(group_of: dict[str, int]) -> None:
    """As the last layers of Gemma 3n: vLLM registers for them the tensors of others, and no group has them."""
    connector: Any = object.__new__(CrossKVConnector)
    connector.groups, connector.unsupported = KVGroups((512, None), group_of), "it is not moved"
    caches = {f"model.layers.{layer}.attn": torch.zeros(1) for layer in range(2)}
    connector.register_kv_caches({**caches, "model.layers.2.attn": caches["model.layers.0.attn"]})
    assert len(connector.kv_caches) == (2 if group_of else 3)
    assert list(connector._layer_numbers.values()) == list(range(len(connector.kv_caches)))
    if group_of:
        assert connector.groups.runs(list(connector.kv_caches)) == [(range(1), 0), (range(1, 2), 1)]


@pytest.mark.parametrize(
    ("status", "loads", "waits", "wants_blocks"),
    [
        (RequestStatus.WAITING, False, False, True),
        (RequestStatus.PREEMPTED, False, False, True),
        (RequestStatus.WAITING, False, True, False),
        (RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, False, False, False),
        (RequestStatus.WAITING_FOR_REMOTE_KVS, True, False, False),
    ],
    ids=lambda value: str(value),
)
def test_only_a_request_that_waits_for_blocks_makes_room_when_nothing_runs(
    status: RequestStatus, loads: bool, waits: bool, wants_blocks: bool
) -> None:
    side: Any = object.__new__(SchedulerSide)
    made: list[bool] = []
    side._saves = SimpleNamespace(make_room=lambda: made.append(True))
    tracked = SimpleNamespace(
        request=SimpleNamespace(status=status), is_loading=loads, wait=SimpleNamespace(goes_on=waits)
    )
    side._tracked = {"one": tracked}
    side.nothing_runs()
    assert made == [True] * wants_blocks


def test_no_load_goes_layer_by_layer_while_every_load_thread_waits_for_a_tier() -> None:
    transfer: Any = SimpleNamespace(has_idle_loader=True)
    step: Any = SimpleNamespace(choice=SimpleNamespace(timeout_s=lambda *_: 0.5), buffer=SimpleNamespace(free_bytes=1))
    whole = WholePath(transfer, 32, 2.0)
    path = LayerwisePath(whole, step, transfer, None, 32, lambda: 0, lambda: 512)  # type: ignore[arg-type]
    request: Any = SimpleNamespace(request_id="one", num_tokens=200)
    stored = [PlannedLoad(b"4" * 32, 0, 4, "cpu", "node", 100)]
    tracked = TrackedRequest(request, PlannedChain(stored, 1, 2.0))
    for idle in (True, False):
        transfer.has_idle_loader = idle
        proposal = path.propose(tracked, 0)
        assert proposal is not None
        assert (proposal.end_block, proposal.is_async) == (4, not idle)
        assert proposal.path is (path if idle else whole)


@pytest.mark.parametrize(("has_windows", "boundary"), [(True, 4), (False, 0)])
def test_of_a_model_with_windows_a_load_ends_where_vllm_keeps_them(has_windows: bool, boundary: int) -> None:
    request: Any = SimpleNamespace(request_id="one", num_tokens=200)
    stored = [PlannedLoad(b"4" * 32, 0, 4, "cpu", "node", 100)]
    tracked = TrackedRequest(request, PlannedChain(stored, 1, 2.0))
    transfer: Any = None
    proposal = WholePath(transfer, 32, 2.0, has_windows=has_windows).propose(tracked, 0)
    assert proposal is not None
    assert (proposal.end_block, proposal.boundary_block) == (4, boundary)


@pytest.mark.parametrize(
    ("first", "known_to_vllm", "boundary"), [(0, 0, 3), (0, 5, 5), (2, 1, 3), (3, 5, 0)], ids=lambda value: str(value)
)
def test_of_a_model_with_states_vllm_keeps_them_where_a_prompt_has_parted_or_further_on(
    first: int, known_to_vllm: int, boundary: int
) -> None:
    tracked, path = stateful(known_to_vllm), states_path()
    tracked.saving.keep_boundary(3)
    proposal = path.propose(tracked, first)
    assert (proposal.end_block, proposal.boundary_block) == (first, boundary)


def stateful(known_to_vllm: int = 0) -> TrackedRequest:
    """A request of six whole blocks and eight tokens."""
    request: Any = SimpleNamespace(request_id="one", num_tokens=200, shared_prefix_boundary=known_to_vllm * 32)
    return TrackedRequest(request, PlannedChain((), 0, 2.0))


def states_path() -> StatesPath:
    settings = SimpleNamespace(kv=SimpleNamespace(segment_tokens=64))
    parts: Any = SimpleNamespace(whole=None, transfer=None, states=SimpleNamespace(), block_size=32, settings=settings)
    return StatesPath(parts)


@pytest.mark.parametrize(
    ("named", "kept"), [(1, 1), (6, 6), (7, 0), (1 << 40, 0), (-1, 0), (0, 0)], ids=lambda value: str(value)
)
def test_states_are_kept_within_a_prompt_whatever_a_plan_names(named: int, kept: int) -> None:
    tracked, path = stateful(), states_path()
    path.entered(tracked, EngineHints(Plan(extras={STATES: PlannedLanding(kept_block=named)})))
    assert (tracked.saving.kept_boundary, path.propose(tracked, 0).boundary_block) == (kept, kept)


@pytest.mark.parametrize(
    ("first", "end", "ends"),
    [(0, 10, [5, 8, 10]), (5, 10, [8, 10]), (8, 9, [10]), (0, 8, [5, 8]), (0, 5, [5]), (4, 6, [5, 8])],
)
def test_a_load_asks_for_no_segment_that_brings_nothing(first: int, end: int, ends: list[int]) -> None:
    overlapping = [
        PlannedLoad(bytes([end]) * 32, start, end - start, "cpu", "node", 100)
        for start, end in ((0, 5), (5, 8), (3, 10))
    ]
    request: Any = SimpleNamespace(num_tokens=160)
    tracked = TrackedRequest(request, PlannedChain(overlapping, 1, 1.0))
    assert [load.end_block for load in tracked.plan.between(first, end)] == ends


def test_who_has_waited_for_a_load_that_failed_does_not_load_the_same_segments() -> None:
    request: Any = SimpleNamespace(request_id="one", num_tokens=200)
    stored = [PlannedLoad(b"4" * 32, 0, 4, "cpu", "node", 100)]
    tracked = TrackedRequest(request, PlannedChain(stored, 1, 2.0), SaveProgress(4))
    whole = WholePath(None, 32, 2.0)  # type: ignore[arg-type]
    load = LoadUnderWay(0, [b"1", b"2", b"3", b"4"])
    tracked.wait.begin(Awaited(load, upto=4, device_tokens=0))
    assert whole.propose(tracked, 1) is not None
    load.ended, load.failed_at = True, 1
    assert whole.propose(tracked, 1) is None
    assert (tracked.plan.loads, tracked.saving.blocks) == ((), 1), "what did not come is computed, and saved"
