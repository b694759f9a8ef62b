"""The parts of layerwise transfer, without an engine."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from app.control.administrators import layer_times
from app.metrics.ingress import IngressMetrics
from app.metrics.parts import PartsMetrics
from configs.kv_section import LayerwiseSettings
from deployments.protocol.families import labelled
from deployments.protocol.kv_port import LayerArrival, in_layer_groups
from deployments.transfer.jobs import LoadJob, load_parts
from deployments.transfer.layerwise_choice import LATE, LayerwiseChoice, MeasuredRates, group_ends
from deployments.transfer.layerwise_load import LayerwiseLoad
from deployments.transfer.layerwise_save import HostBuffer, StepDiscardedError, StepProgress
from deployments.transfer.layerwise_streams import CUDAStreams, HostStreams
from deployments.transfer.layerwise_times import LayerTimes
from deployments.transfer.segment_copy import SegmentCopier
from deployments.transfer.threads import KVTransfer
from kernels.paged.layout import LayoutKind, PagedLayout
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import SegmentMismatch, open_segment
from kvmanager.segments.keys import EXACT, SegmentKey
from kvmanager.segments.spans import NodeKind, SegmentSpan
from load_tests.harness.memory_port import MemoryPort, made_up_hashes
from load_tests.harness.patience import patience

LAYERS, BLOCK = 4, 32
FINGERPRINT = bytes(range(32))
LAYOUT = PagedLayout(LayoutKind.CPU_VEC, BLOCK, 2, 16, torch.float32)


def copier(seed: int) -> SegmentCopier:
    """A KV cache of 8 blocks of noise."""
    draw = torch.Generator().manual_seed(seed)
    return SegmentCopier(
        [torch.rand(8, *LAYOUT.block_shape, generator=draw) for _ in range(LAYERS)], LAYOUT, FINGERPRINT
    )


def span(number: int, blocks: int) -> SegmentSpan:
    parent = SegmentKey(bytes([number]) * 32) if number else None
    marks = bytes([number + 1]) * 8 * blocks
    return SegmentSpan(SegmentKey(bytes([number + 1]) * 32), parent, number * 2, blocks, NodeKind.REQUEST, marks)


def planned(of: SegmentSpan, tier: str = "cpu") -> PlannedLoad:
    return PlannedLoad(of.key, of.start_block, of.num_blocks, tier, "node", 0)


class TwoSegments(MemoryPort):
    """Segments of two blocks each, read from the cache of `source`, and an event before each arrival."""

    def __init__(self, source: SegmentCopier) -> None:
        super().__init__()
        self.loads = [planned(span(number, 2)) for number in range(2)]
        self.sealed = [
            source.read(span(number, 2), made_up_hashes(span(number, 2)), [2 * number, 2 * number + 1], EXACT)
            for number in range(2)
        ]
        self.gates: dict[int, threading.Event] = {}

    def fetch_layers(
        self, loads: Sequence[PlannedLoad], group_ends: Sequence[int], deadline: float
    ) -> Iterator[LayerArrival]:
        for number, arrival in enumerate(in_layer_groups((each.data for each in self.sealed), group_ends)):
            if number in self.gates:
                assert self.gates[number].wait(patience(30))
            yield arrival


def load_into(target: SegmentCopier, port: TwoSegments, timeout_s: float = 60.0) -> LayerwiseLoad:
    job = LoadJob("request", 1, port.loads, 0, [4, 5, 6, 7])
    mismatches: list[Any] = []
    times = LayerTimes(LAYERS)
    deadline = time.monotonic() + patience(timeout_s)
    return LayerwiseLoad(
        job, target, [1, 2, 3, 4], deadline, HostStreams(), times, lambda *told: mismatches.append(told)
    )


@pytest.mark.parametrize("lost", [None, 700])
def test_a_load_of_many_short_segments_costs_as_much_for_each_as_one_of_few(lost: int | None) -> None:
    """The engine's step waits for it, and a conversation of many short turns has a segment or two for each."""

    class Many(TwoSegments):
        def fetch_layers(self, *_: Any) -> Iterator[LayerArrival]:
            return (
                LayerArrival(at, None if at == lost else memoryview(b""), end)
                for end in range(1, LAYERS + 1)
                for at in range(len(loads) if end == 1 or lost is None else lost)
            )

    loads = [PlannedLoad(at.to_bytes(32, "little"), at, 1, "cpu", "node", 100) for at in range(1000)]
    opened = SimpleNamespace(write=lambda layers, skip, ids: None)
    target = SimpleNamespace(layers=[None] * LAYERS, open=lambda sealed, load: opened)
    job = LoadJob("request", 1, loads, 0, list(range(1000)))
    warm, load = (
        LayerwiseLoad(
            job, target, [1, 2, 3, 4], time.monotonic() + patience(60), HostStreams(), LayerTimes(LAYERS), print
        )  # type: ignore[arg-type]
        for _ in range(2)
    )
    warm.run(Many(copier(1)))  # what is compiled or imported with the first load is not counted
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        load.run(Many(copier(1)))
    finally:
        sys.setprofile(None)
    assert calls <= 100 * LAYERS * len(loads)
    wait_for_all(load)
    assert load.close() == (1000 if lost is None else lost)


def wait_for_all(load: LayerwiseLoad) -> None:
    for layer in range(LAYERS):
        load.wait(layer)


def test_all_layers_arrive_where_they_belong() -> None:
    source, target = copier(1), copier(2)
    load = load_into(target, TwoSegments(source))

    load.run(TwoSegments(source))
    wait_for_all(load)

    assert load.close() == 4
    assert load.seconds > 0
    for layer in range(LAYERS):
        assert torch.equal(target.layers[layer][4:8], source.layers[layer][0:4])


def test_a_step_that_has_not_waited_for_every_layer_counts_for_nothing() -> None:
    source = copier(1)
    load = load_into(copier(2), TwoSegments(source))
    load.run(TwoSegments(source))
    for layer in range(LAYERS - 1):
        load.wait(layer)

    assert load.close() == 0


def test_what_arrives_after_the_end_is_written_nowhere() -> None:
    source, target = copier(1), copier(2)
    before = [layer.clone() for layer in target.layers]
    port = TwoSegments(source)
    port.gates[3] = threading.Event()  # the second layer of the second segment
    load = load_into(target, port, timeout_s=0.0)
    thread = threading.Thread(target=load.run, args=(port,))
    thread.start()
    wait_for_all(load)

    assert load.close() == 0
    assert load.late_s > 0
    now = [layer.clone() for layer in target.layers]
    port.gates[3].set()
    thread.join(patience(30))

    assert all(torch.equal(*pair) for pair in zip(target.layers, now, strict=True))
    assert torch.equal(target.layers[1][6:8], before[1][6:8])


def test_the_engine_waits_for_a_layer_of_all_segments_and_for_no_more() -> None:
    source = copier(1)
    port = TwoSegments(source)
    port.gates[2] = threading.Event()  # layer 1
    load = load_into(copier(2), port)
    thread = threading.Thread(target=load.run, args=(port,))
    thread.start()

    load.wait(0)
    assert not port.gates[2].is_set(), "layer 0 is there although layer 1 is not"
    threading.Timer(0.05, port.gates[2].set).start()
    waited = [load.wait(layer) for layer in range(1, LAYERS)]
    thread.join(patience(30))

    assert waited[0] > 0
    assert load.close() == 4


def test_a_segment_read_layer_by_layer_is_the_segment_read_at_once() -> None:
    source = copier(3)
    read = source.begin_read(span(0, 2), made_up_hashes(span(0, 2)), [5, 3], EXACT)
    for layer in range(LAYERS):
        read.copy(layer)
        read.seal_layer()
    assert np.array_equal(read.finish(), source.read(span(0, 2), made_up_hashes(span(0, 2)), [5, 3], EXACT))


def test_a_damaged_layer_is_not_written_and_the_others_can_be() -> None:
    source, target = copier(1), copier(2)
    sealed = bytearray(source.read(span(0, 2), made_up_hashes(span(0, 2)), [0, 1], EXACT).tobytes())
    sealed[-1] ^= 1  # the last layer
    before = target.layers[3].clone()
    opened = target.open(memoryview(sealed), planned(span(0, 2)))

    opened.write(range(3), 1, [6])
    with pytest.raises(SegmentMismatch):
        opened.write(range(2, 4), 0, [4, 5])

    assert torch.equal(target.layers[2][6], source.layers[2][1])
    assert torch.equal(target.layers[3], before)
    with pytest.raises(SegmentMismatch):
        open_segment(
            sealed,
            key=span(0, 2).key,
            fingerprint=FINGERPRINT,
            shape=LAYOUT.segment_shape(4, 2),
            dtype="float32",
            num_blocks=2,
        )


@pytest.mark.parametrize(("layers", "per_group", "ends"), [(6, 1, [1, 2, 3, 4, 5, 6]), (7, 3, [3, 6, 7]), (2, 2, [2])])
def test_groups_cover_all_layers(layers: int, per_group: int, ends: list[int]) -> None:
    assert group_ends(layers, per_group) == ends


def test_a_missing_segment_ends_the_segments_but_not_the_layers_before_it() -> None:
    first = memoryview(b"first")
    arrivals = list(in_layer_groups(iter([first, None, first]), [2, 4]))
    assert arrivals == [LayerArrival(0, first, 2), LayerArrival(1, None, 2), LayerArrival(0, first, 4)]


def test_a_model_moves_by_eighths() -> None:
    assert [LayerwiseSettings().layers_per_group(layers) for layers in (3, 6, 24, 80)] == [1, 1, 3, 10]


class CPUOnly(MemoryPort):
    def brings_layers(self, tier: str) -> bool:
        return tier == "cpu"


def choice(mode: str = "auto", loads_per_s: float = 1e6) -> LayerwiseChoice:
    """Blocks of 1 kB, a load of 100 of them takes 0.1 s, and 100 tokens are computed in 0.1 s."""
    rates = MeasuredRates()
    for size in range(1, 21):
        rates.add(("load", "cpu", 32 * size, 1000 * size, 1000 * size / loads_per_s))
        rates.add(("prefill", 10 * size, size / 100))
    return LayerwiseChoice(LayerwiseSettings(enabled=mode), CPUOnly(), rates, 1000, [1, 2, 3, 4])


LONG = SegmentSpan(SegmentKey(b"k" * 32), None, 0, 100, NodeKind.REQUEST, b"k" * 800)
PARTS = load_parts([planned(LONG)], 0, 100)


def test_a_load_that_hides_behind_the_computation_is_layerwise_and_has_a_short_timeout() -> None:
    assert choice().timeout_s(PARTS, 0, 100, 0, 10**9, 2.0) == pytest.approx(LATE * 0.1)


def test_whole_prefixes_are_loaded_while_others_decode_before_anything_is_measured_and_from_tiers_without_layers() -> (
    None
):
    assert choice().timeout_s(PARTS, 0, 100, 1, 10**9, 2.0) is None
    assert choice().timeout_s(PARTS, 0, 100, 0, 1000, 2.0) is None, "the buffer is full"
    new = LayerwiseChoice(LayerwiseSettings(), CPUOnly(), MeasuredRates(), 1000, [1, 2, 3, 4])
    assert new.timeout_s(PARTS, 0, 100, 0, 10**9, 2.0) is None
    from_redis = load_parts([planned(LONG, "redis")], 0, 100)
    assert choice("on").timeout_s(from_redis, 0, 100, 0, 10**9, 2.0) is None


def test_after_a_load_that_was_given_up_the_tier_is_not_waited_for_so_soon() -> None:
    chosen = choice()
    for _ in range(8):
        chosen._rates.given_up("cpu", 100_000, 0.4)
    assert chosen.timeout_s(PARTS, 0, 100, 0, 10**9, 2.0) is None


def test_the_setting_decides_alone_when_it_says_on_or_off() -> None:
    assert choice("on").timeout_s(PARTS, 0, 100, 9, 10**9, 2.0) == 2.0
    assert choice("on").timeout_s(PARTS, 0, 100, 9, 10**9, 64.0) == 64.0, "a long load has its own time"
    assert choice("on").timeout_s(PARTS, 0, 1, 0, 10**9, 2.0) is None, "one token: nothing to hide behind"
    assert choice("off").timeout_s(PARTS, 0, 100, 0, 10**9, 2.0) is None


def test_a_buffer_gives_what_it_has_and_no_more() -> None:
    buffer = HostBuffer(10)
    assert [buffer.take(6), buffer.take(6), buffer.take(4)] == [True, False, True]
    buffer.give(6)
    assert buffer.free_bytes == 6


def test_a_save_follows_the_engine_and_ends_with_a_step_that_does_not_count() -> None:
    copied: list[int] = []
    read: Any = SimpleNamespace(copy=copied.append, seal_layer=lambda: None)
    progress = StepProgress(2, HostStreams())
    ended: list[Any] = []

    def save() -> None:
        try:
            progress.copy([read])
            ended.append("counts")
        except StepDiscardedError:
            ended.append("discarded")

    thread = threading.Thread(target=save)
    thread.start()
    progress.layer_computed(None)
    progress.layer_computed(None)
    progress.end(counts=False)
    thread.join(patience(30))
    assert ended == ["discarded"]

    progress = StepProgress(2, HostStreams())
    progress.layer_computed(None)
    progress.end(counts=True)
    with pytest.raises(StepDiscardedError):
        progress.copy([read])


def test_a_segment_of_which_nothing_arrived_is_not_counted_though_it_begins_before_what_did() -> None:
    transfer = KVTransfer(copier(1), MemoryPort(), max_held_blocks=8, blocks_per_segment=8, load_deadline_s=1.0)
    loads = [PlannedLoad(bytes([end]) * 32, start, end - start, "cpu", "", 100) for start, end in ((0, 5), (3, 8))]
    transfer.note_layerwise(LoadJob("request", 0, loads, 0, list(range(8))), 100, 0.0, arrived=5)
    transfer.close()
    assert transfer.counters.segments_loaded == 1


def test_times_are_shown_by_layer_and_read_back() -> None:
    times = LayerTimes(3)
    times.loaded(range(2), 0.004)
    times.loaded(range(2), 0.008)
    for seconds in (0.001, 0.003):
        times.waited(1, seconds)
    shown = labelled(times.registry.collect(), replica="1")

    counts = [s for family in shown for s in family.samples if s.name == "crosskv_layerwise_load_latency_count"]
    assert [(sample.labels, sample.value) for sample in counts] == [({"replica": "1"}, 4.0)]

    async def source() -> list[Metric]:
        return shown

    async def gone() -> list[Metric]:
        raise OSError("gone")

    parts = PartsMetrics(IngressMetrics(CollectorRegistry()), lambda: [source, gone])
    assert layer_times(asyncio.run(parts.families())) == [
        {"replica": 1, "layer": 0, "count": 2, "load_ms": 3.0, "wait_ms": None},
        {"replica": 1, "layer": 1, "count": 2, "load_ms": 3.0, "wait_ms": 2.0},
        {"replica": 1, "layer": 2, "count": 0, "load_ms": None, "wait_ms": None},
    ]
    assert layer_times([Metric("nothing_of_ours", "", "gauge")]) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA streams and events need a CUDA device; there is none")
def test_cuda_copies_run_on_their_streams_and_the_computation_waits_for_them() -> None:
    device = torch.device("cuda")
    streams = CUDAStreams(device)
    source = torch.arange(1 << 24, dtype=torch.float32, device=device)
    target, host = torch.zeros_like(source), torch.zeros(1 << 24, pin_memory=True)
    with streams.loading(streams.mark_compute()):
        torch.cuda._sleep(50_000_000)
        target.copy_(source)
    streams.compute_awaits(streams.mark_load())
    doubled = target * 2
    with streams.storing(streams.mark_compute()):
        host.copy_(doubled, non_blocking=True)
    streams.await_stores()
    assert torch.equal(host, 2 * torch.arange(1 << 24, dtype=torch.float32))
