"""Tolerant prompts' KV that is stored under another label, or twice: what may come of it, and what may not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from memory_store import CODING, MemoryProfiles, MemoryStore
from redis_fixture import FINGERPRINT
from small_codecs import SmallKit, SmallProfile, kv_segment

from deployments.engine.load_paths.whole import WholePath
from deployments.engine.pool.block_owners import BlockOwners
from deployments.engine.pool.control import PoolControl
from deployments.engine.request_saves import DenseSaves
from deployments.engine.request_scores import RequestScores
from deployments.engine.scheduler_side import SchedulerSide
from deployments.protocol.engine_hints import EngineHints
from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.coded_store import CodedStore
from deployments.segment_store.segment_codecs import SegmentCodecs
from deployments.transfer.held_save import HeldSaves
from deployments.transfer.threads import SaveJob
from kvmanager.moves.plan import Plan, PlannedLoad
from kvmanager.segments.format import SegmentMismatch, read_header
from kvmanager.segments.keys import EXACT, TOLERANT, Fidelity, block_hashes, cache_salt
from kvmanager.segments.server_secret import ServerSecret
from kvmanager.segments.spans import SegmentSpan, split_segments

BLOCK, SEGMENT_BLOCKS, BLOCKS = 4, 2, 6
TOKENS = list(range(BLOCK * BLOCKS))


def hashes_of(fidelity: Fidelity) -> list[Any]:
    return block_hashes(TOKENS, BLOCK, cache_salt(ServerSecret(bytes(32)), FINGERPRINT, "somebody", fidelity))


def spans_of(fidelity: Fidelity) -> list[SegmentSpan]:
    hashes = hashes_of(fidelity)
    return split_segments(hashes, 0, len(hashes), SEGMENT_BLOCKS, len(hashes))


class Device:
    """A pool that has the blocks of one prompt, and a transfer that notes what is to be saved."""

    def __init__(self, fidelity: Fidelity) -> None:
        hashes = hashes_of(fidelity)
        self.parents = {block: hashes[number - 1] if number else None for number, block in enumerate(hashes)}
        self.blocks = [SimpleNamespace(block_id=number, block_hash=block) for number, block in enumerate(hashes)]
        self.cached = {block.block_hash: block for block in self.blocks}
        self.jobs: list[SaveJob] = []

    def get_cached_block(self, block_hash: bytes, groups: Sequence[int]) -> Any:
        return [self.cached[block_hash]] if block_hash in self.cached else None

    def touch(self, blocks: Sequence[Any]) -> None:
        pass

    def blocks_that_fit(self) -> int:
        return BLOCKS

    def submit_save(self, job: SaveJob) -> bool:
        self.jobs.append(job)
        return True

    def count_dropped(self, segments: int) -> None:
        assert segments == 0

    def saved(self) -> list[bytes]:
        return [span.key for job in self.jobs for span in cut(job)]


def cut(job: SaveJob) -> list[SegmentSpan]:
    """The segments that a save becomes where nothing of it is stored."""
    hashes, first, end, prompt, tenant = job.offered
    return split_segments(hashes, first, end, SEGMENT_BLOCKS, prompt, tenant)


@pytest.fixture
def redis() -> CodedStore:
    """A Redis tier that stores exact segments without loss, tolerant ones with it."""
    profiles = MemoryProfiles()
    inner = CheckedStore(MemoryStore(), FINGERPRINT)
    return CodedStore(inner, FINGERPRINT, SegmentCodecs(CODING, profiles, SmallKit()), profiles, CodecMeter())


def test_an_offload_that_nobody_asked_for_never_loses_anything(redis: CodedStore) -> None:
    device = Device(TOLERANT)
    control = PoolControl(
        pool=device, transfer=device, block_size=BLOCK, parents=device.parents,
        owners=BlockOwners(), publish=lambda: None, on_engine_thread=lambda function: function(),
    )  # type: ignore[arg-type]  # fmt: skip
    spans = spans_of(TOLERANT)
    assert control.offload(spans)[:2] == (len(spans), BLOCKS)
    (job,) = device.jobs
    assert cut(job) == spans, "under the tolerant prompt's names"

    sealed = kv_segment(spans[0], job.fidelity)
    redis.put(spans[0].key, sealed.data)
    back = redis.get(spans[0].key)
    if job.fidelity == EXACT:
        assert np.array_equal(np.frombuffer(back, np.uint8), sealed)
    else:
        assert read_header(redis.fetch(spans[0].key)).fidelity == TOLERANT


@pytest.mark.parametrize("label", [EXACT, TOLERANT])
def test_no_exact_prompt_finds_a_tolerant_ones_kv_whatever_its_header_says(redis: CodedStore, label: Fidelity) -> None:
    """Its header may say exact: an offload does not know better. The name decides."""
    for span in spans_of(TOLERANT):
        redis.put(span.key, kv_segment(span, label).data)

    assert [redis.get(block_hash) for block_hash in hashes_of(EXACT)] == [None] * BLOCKS
    assert all(redis.get(span.key) is not None for span in spans_of(TOLERANT))


@pytest.mark.parametrize("label", [EXACT, TOLERANT])
def test_a_tolerant_segment_under_an_exact_name_is_refused_whatever_its_header_says(
    redis: CodedStore, label: Fidelity
) -> None:
    tolerant, exact = spans_of(TOLERANT)[0], spans_of(EXACT)[0]
    redis.put(tolerant.key, kv_segment(tolerant, label).data)
    with pytest.raises(SegmentMismatch):
        redis.decode(exact.key, bytes(redis.fetch(tolerant.key) or b""))
    with pytest.raises(SegmentMismatch):
        redis.put(exact.key, kv_segment(tolerant, label).data)


def test_a_header_cannot_say_exact_of_a_lossy_form() -> None:
    header = read_header(kv_segment(spans_of(TOLERANT)[0], EXACT))
    with pytest.raises(ValueError, match="exact"):
        replace(header, codec="cachegen", level=2, profile=SmallProfile(1).digest)


def computed(device: Device, planned: Sequence[SegmentSpan]) -> Any:
    """A tolerant request whose whole prompt has its KV on the device, `planned` of it brought by the plan."""
    manager: Any = SimpleNamespace(block_pool=device, get_block_ids=lambda request_id: [list(range(BLOCKS))])
    layerwise: Any = SimpleNamespace(saves=False)
    transfer: Any = device
    held_saves = HeldSaves(manager.block_pool, transfer, lambda function: function())
    saves = DenseSaves(manager, held_saves, layerwise, BLOCK, SEGMENT_BLOCKS)
    port: Any = SimpleNamespace(release=lambda lease: None)
    side = SchedulerSide(
        port=port, transfer=transfer, paths=[WholePath(transfer, BLOCK, 2.0)], saves=saves,
        scores=RequestScores(manager, BLOCK), owners=BlockOwners(), block_size=BLOCK, replica="0", load_deadline_s=2.0,
    )  # fmt: skip
    loads = tuple(PlannedLoad(span.key, span.start_block, span.num_blocks, "redis", "", 0) for span in planned)
    hints = EngineHints(Plan(segments=loads), fidelity=TOLERANT)
    request = SimpleNamespace(
        request_id="r", kv_transfer_params=hints.as_transfer(), block_hashes=hashes_of(TOLERANT),
        num_prompt_tokens=len(TOKENS), num_tokens=len(TOKENS), num_computed_tokens=len(TOKENS), mm_features=[],
    )  # fmt: skip
    side.add(request)  # type: ignore[arg-type]
    side.save_progress(["r"])
    return device


@pytest.mark.parametrize(
    ("planned", "first_saved"),
    [(lambda: spans_of(TOLERANT)[:2], 2), (lambda: spans_of(EXACT)[:2], 0), (list, 0)],
    ids=["its own", "its exact twin's", "nothing"],
)
def test_what_came_from_the_exact_twin_is_saved_once_more_so_that_its_children_have_a_parent(
    planned: Callable[[], list[SegmentSpan]], first_saved: int
) -> None:
    device = computed(Device(TOLERANT), planned())

    assert device.saved() == [span.key for span in spans_of(TOLERANT)[first_saved:]]
    assert {job.fidelity for job in device.jobs} == {TOLERANT}
    assert cut(device.jobs[0])[0].parent == (spans_of(TOLERANT)[first_saved - 1].key if first_saved else None)
