"""Coded in Redis, raw outside: with codecs of a few lines, and a store in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from memory_store import CODING, MemoryProfiles, MemoryStore
from redis_fixture import FINGERPRINT, SHAPE, chain
from redis_fixture import sealed as random_segment
from small_codecs import Lossless, SmallKit, SmallProfile, kv_segment

from deployments.segment_store.base import StoreUnavailableError
from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.coded_store import CodedStore
from deployments.segment_store.segment_codecs import RAW_CODING, Coding, SegmentCodecs
from kernels.dtypes import Array
from kvmanager.segments.format import (
    HEADER_BYTES,
    MismatchReason,
    SegmentHeader,
    SegmentMismatch,
    body_offset,
    coded_body_offset,
    open_segment,
    payload_bytes,
    read_header,
    seal,
    verify,
)
from kvmanager.segments.header import CODECS
from kvmanager.segments.sizes import MOST_SEGMENT_BYTES
from load_tests.harness.memory_port import made_up_hashes

SPAN = chain(1, 1)[0]
RAW_BYTES = kv_segment(SPAN).nbytes


class World:
    def __init__(self, coding: Coding = CODING, before: World | None = None) -> None:
        """`before`: the same Redis, met by another worker."""
        self.inner = before.inner if before else MemoryStore()
        self.profiles = before.profiles if before else MemoryProfiles()
        self.kit, self.meter = SmallKit(), CodecMeter()
        self.checked = CheckedStore(self.inner, FINGERPRINT)
        codecs = SegmentCodecs(coding, self.profiles, self.kit)
        self.store = CodedStore(self.checked, FINGERPRINT, codecs, self.profiles, self.meter)

    @property
    def stored(self) -> bytes:
        return self.inner.held[SPAN.key]

    def reason(self) -> MismatchReason:
        with pytest.raises(SegmentMismatch) as refused:
            self.store.get(SPAN.key)
        return refused.value.reason

    def replace_sections(self, sections: Sequence[bytes], **changes: Any) -> None:
        """Other sections under the header that is there, all checksums right."""
        header = read_header(self.stored)
        start = coded_body_offset(len(sections), header.num_blocks)
        body_bytes = start - header.head_bytes + sum(map(len, sections))
        header = replace(header, body_bytes=body_bytes, **changes)
        buffer = bytearray(start) + b"".join(sections)
        seal(buffer, header, [len(section) for section in sections])
        self.inner.held[SPAN.key] = bytes(buffer)


@pytest.fixture
def world() -> World:
    return World()


def values(sealed: Any) -> torch.Tensor:
    payload = open_segment(
        bytes(sealed),
        key=SPAN.key,
        fingerprint=FINGERPRINT,
        shape=SHAPE,
        dtype="bfloat16",
        num_blocks=SPAN.num_blocks,
    )
    return torch.frombuffer(bytearray(payload), dtype=torch.bfloat16).float()


def test_an_exact_segment_lies_coded_and_comes_back_byte_for_byte(world: World) -> None:
    sealed = kv_segment(SPAN)
    assert world.store.put(SPAN.key, sealed.data) == len(world.stored) < RAW_BYTES
    header = verify(world.stored, key=SPAN.key, fingerprint=FINGERPRINT)
    assert (header.codec, header.level, header.profile, header.fidelity) == ("lossless", 0, b"", "exact")
    assert (header.sealed_bytes, header.raw_sealed_bytes) == (len(world.stored), RAW_BYTES)
    assert np.array_equal(np.frombuffer(world.store.get(SPAN.key), np.uint8), sealed)
    assert world.store.get(b"?" * 32) is None


def test_another_worker_decodes_it(world: World) -> None:
    world.store.put(SPAN.key, kv_segment(SPAN).data)
    other = World(RAW_CODING, before=world)
    assert bytes(other.store.get(SPAN.key)) == kv_segment(SPAN).tobytes()


def test_what_cannot_be_made_smaller_is_stored_as_it_is(world: World) -> None:
    sealed = random_segment(SPAN)
    assert world.store.put(SPAN.key, sealed.data) == sealed.nbytes
    assert world.stored == sealed.tobytes()
    assert world.store.get(SPAN.key) == sealed.tobytes()


@pytest.mark.parametrize("fidelity", ["exact", "tolerant"])
def test_kv_of_bytes_whose_meaning_is_not_known_is_stored_raw(world: World, fidelity: str) -> None:
    header = SegmentHeader.raw(SPAN, made_up_hashes(SPAN), FINGERPRINT, SHAPE, "uint8", fidelity)
    sealed = bytearray(header.sealed_bytes)
    seal(sealed, header)
    assert world.store.put(SPAN.key, sealed) == len(sealed)
    assert world.stored == bytes(sealed)


@pytest.mark.parametrize("fidelity", ["exact", "tolerant"])
def test_latents_are_coded_without_loss_whatever_their_prompt_tolerates(fidelity: str) -> None:
    profiles, inner = MemoryProfiles(), MemoryStore()
    codecs = SegmentCodecs(replace(CODING, exact="lossless", tolerant="cachegen"), profiles)
    store = CodedStore(CheckedStore(inner, FINGERPRINT), FINGERPRINT, codecs, profiles, CodecMeter())
    shape = (3, 1, 16 * SPAN.num_blocks, 1, 576)
    header = SegmentHeader.raw(SPAN, made_up_hashes(SPAN), FINGERPRINT, shape, "bfloat16", fidelity)
    sealed = np.empty(header.sealed_bytes, np.uint8)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    sealed[header.body_offset :] = latents.view(torch.uint8).numpy().reshape(-1)
    seal(sealed.data, header)
    store.put(SPAN.key, sealed.data)
    stored = read_header(inner.held[SPAN.key])
    assert (stored.codec, stored.fidelity, profiles.held) == ("lossless", fidelity, {})
    assert stored.sealed_bytes < 0.8 * header.sealed_bytes
    assert np.array_equal(np.frombuffer(store.get(SPAN.key), np.uint8), sealed)


def test_where_all_is_raw_no_codec_is_made() -> None:
    world = World(RAW_CODING)
    for fidelity in ("exact", "tolerant"):
        assert world.store.put(SPAN.key, kv_segment(SPAN, fidelity).data) == RAW_BYTES
        assert world.store.get(SPAN.key) == kv_segment(SPAN, fidelity).tobytes()
    assert world.kit.made == []


def test_a_tolerant_segment_is_coded_with_loss_and_comes_back_raw_and_nearly_the_same(world: World) -> None:
    sealed = kv_segment(SPAN, "tolerant")
    assert world.store.put(SPAN.key, sealed.data) == len(world.stored) < 0.6 * RAW_BYTES
    header = read_header(world.stored)
    assert (header.codec, header.level, header.fidelity) == ("cachegen", 2, "tolerant")
    assert world.profiles.held.keys() == {header.profile}
    raw = world.store.get(SPAN.key)
    assert read_header(bytes(raw)) == read_header(sealed.tobytes()), "the header is the raw segment's again"
    assert (values(raw) - values(sealed)).abs().max() < 1.5
    assert not torch.equal(values(raw), values(sealed))


def test_an_exact_segment_is_never_coded_with_loss(world: World) -> None:
    world.store.put(SPAN.key, kv_segment(SPAN).data)
    assert {name for name, _, _ in world.kit.made} == {"lossless"}
    with pytest.raises(ValueError, match="exact"):
        world.replace_sections([b"", b""], codec="cachegen")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_of_what_is_stored_is_a_mismatch(data: Any) -> None:
    world = World()
    world.store.put(SPAN.key, kv_segment(SPAN).data)
    damaged = bytearray(world.stored)
    bit = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[bit // 8] ^= 1 << bit % 8
    world.inner.held[SPAN.key] = bytes(damaged)
    world.reason()


@given(st.lists(st.binary(max_size=400), min_size=2, max_size=2), st.sampled_from(["exact", "tolerant"]))
@settings(max_examples=60, deadline=None)
def test_sections_that_no_codec_wrote_are_a_mismatch_though_their_checksums_are_right(
    sections: list[bytes], fidelity: str
) -> None:
    world = World()
    world.store.put(SPAN.key, kv_segment(SPAN, fidelity).data)
    world.replace_sections(sections)
    assert world.reason() is MismatchReason.CODEC


def test_a_lossless_codec_that_decodes_something_else_is_found_out(world: World) -> None:
    class Forgetful(Lossless):
        def decode(self, layer: int, coded: memoryview, out: Array) -> None:
            super().decode(layer, coded, out)
            if layer == 1:
                out.view(np.uint8)[0, 0, 0, 0] ^= 1

    world.kit.lossless = Forgetful()
    world.store.put(SPAN.key, kv_segment(SPAN).data)
    assert world.reason() is MismatchReason.CODEC


def test_a_damaged_raw_segment_is_not_stored_under_a_right_checksum(world: World) -> None:
    for offset in (-1, body_offset(SHAPE, "bfloat16", SPAN.num_blocks), HEADER_BYTES, 60):
        damaged = kv_segment(SPAN)
        damaged[offset] ^= 1
        with pytest.raises(SegmentMismatch):
            world.store.put(SPAN.key, damaged.data)
    with pytest.raises(SegmentMismatch):
        world.store.put(b"?" * 32, kv_segment(SPAN).data)
    assert world.inner.held == {}


def test_a_segment_that_the_codec_does_not_take_is_stored_raw_and_said_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    class Picky(Lossless):
        def encode(self, layer: int, kv: Array) -> Any:
            raise ValueError("not this layout")

    world.kit.lossless = Picky()
    for span in chain(2, 2):
        assert world.store.put(span.key, kv_segment(span).data) == RAW_BYTES
    assert len([record for record in caplog.records if "not this layout" in record.message]) == 1


# Profiles.


def test_a_profile_that_redis_does_not_have_is_a_mismatch(world: World) -> None:
    world.store.put(SPAN.key, kv_segment(SPAN, "tolerant").data)
    (digest,) = world.profiles.held
    for content in (None, b"", b"garbage", SmallProfile(77).to_bytes()):
        world.profiles.held = {} if content is None else {digest: content}
        assert World(before=world).reason() is MismatchReason.PROFILE


def test_a_profile_that_cannot_be_asked_for_says_nothing_about_the_segment(world: World) -> None:
    world.store.put(SPAN.key, kv_segment(SPAN, "tolerant").data)
    other = World(before=world)
    other.profiles.reachable = False
    with pytest.raises(StoreUnavailableError):
        other.store.get(SPAN.key)
    other.profiles.reachable = True
    assert other.store.get(SPAN.key) is not None


def test_a_profile_is_asked_for_once(world: World) -> None:
    world.store.put(SPAN.key, kv_segment(SPAN, "tolerant").data)
    other = World(before=world)
    for _ in range(3):
        other.store.get(SPAN.key)
    assert len(other.profiles.asked) == 1


def test_the_models_own_profile_is_used_where_there_is_one() -> None:
    own = SmallProfile(9, b"m" * 16)
    world = World(Coding("lossless", "cachegen", 3, own.digest))
    world.profiles.held[own.digest] = own.to_bytes()
    world.store.put(SPAN.key, kv_segment(SPAN, "tolerant").data)
    header = read_header(world.stored)
    assert (header.profile, header.level) == (own.digest, 3)


def test_a_model_whose_profile_is_gone_gets_a_generic_one_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World(replace(CODING, profile=b"\x07" * 16))
    for span in chain(3, 2):
        world.store.put(span.key, kv_segment(span, "tolerant").data)
        assert read_header(world.inner.held[span.key]).profile == SmallProfile.generic((2, 2, 8)).digest
    assert len([record for record in caplog.records if "generic" in record.message]) == 1


# Bounds.


def test_a_codec_or_level_that_is_not_known_is_a_mismatch(world: World) -> None:
    world.store.put(SPAN.key, kv_segment(SPAN, "tolerant").data)
    sections = [b"x" * 10, b"x" * 10]
    for changes in ({"level": 9}, {"codec": "cachegen", "profile": b""}):
        world.replace_sections(sections, **changes)
        assert world.reason() is MismatchReason.CODEC


def test_what_a_codec_of_an_earlier_version_has_stored_is_a_mismatch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.store.put(SPAN.key, kv_segment(SPAN, "tolerant").data)
    with monkeypatch.context() as earlier:
        earlier.setitem(CODECS, "int8", 2)
        world.replace_sections([b"x" * 10, b"x" * 10], codec="int8", level=0, profile=b"")
    assert world.reason() is MismatchReason.CODEC


def test_nothing_is_allocated_for_a_raw_size_that_a_header_merely_states(world: World) -> None:
    world.store.put(SPAN.key, kv_segment(SPAN).data)
    tokens = 4 * (MOST_SEGMENT_BYTES // payload_bytes((2, 2, 4, 2, 8), "bfloat16") + 1)
    world.replace_sections([b"x" * 10, b"x" * 10], shape=(2, 2, tokens, 2, 8))
    tracemalloc.start()
    try:
        assert world.reason() is MismatchReason.SHAPE
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_segments_that_are_stored_raw_are_counted_as_no_smaller() -> None:
    world = World(RAW_CODING)
    world.store.put(SPAN.key, kv_segment(SPAN).data)
    report = world.meter.report()
    assert report.keys() == {"raw"}
    assert report["raw"]["raw_bytes"] == report["raw"]["coded_bytes"] == len(world.stored) == RAW_BYTES


def test_what_coding_saves_and_takes_is_counted_by_codec(world: World) -> None:
    for fidelity in ("exact", "tolerant"):
        world.store.put(SPAN.key, kv_segment(SPAN, fidelity).data)
        for _ in range(3):
            world.store.get(SPAN.key)
    report = world.meter.report()
    assert report.keys() == {"lossless", "cachegen"}
    assert report["cachegen"]["raw_bytes"] == RAW_BYTES
    assert report["cachegen"]["coded_bytes"] == len(world.stored)
    for counts in report.values():
        assert sum(counts["encoding"]["buckets"]) == 1
        assert sum(counts["decoding"]["buckets"]) == 3
        assert counts["decoding"]["total_s"] > 0
