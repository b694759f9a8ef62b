"""Sparse segments: kept tokens come back as they were, and no reader of dense segments takes one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from memory_store import CODING, MemoryProfiles, MemoryStore
from redis_fixture import FINGERPRINT

from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.coded_store import CodedStore
from deployments.segment_store.segment_codecs import SegmentCodecs
from deployments.segment_store.sparse.segments import open_sparse, sparsified
from kernels.codecs import Codec, CodecProfile, make_codec
from kernels.sparse.kept_layer import KeptLayer
from kvmanager.extensions.sparse.budgets import Budgets
from kvmanager.segments.format import (
    MismatchReason,
    SegmentHeader,
    SegmentMismatch,
    open_layers,
    open_segment,
    read_header,
    read_layers,
    seal,
    verify,
)
from kvmanager.segments.keys import SegmentKey
from kvmanager.segments.spans import split_segments
from load_tests.harness.memory_port import made_up_hashes

BLOCKS, BLOCK_TOKENS, LAYERS, HEADS, DIM = 4, 8, 3, 2, 8
SHAPE = (LAYERS, 2, BLOCKS * BLOCK_TOKENS, HEADS, DIM)
SPAN = split_segments([SegmentKey(bytes([n]) * 32) for n in range(1, BLOCKS + 1)], 0, BLOCKS, BLOCKS, BLOCKS)[0]
BUDGETS = Budgets.of_eighths([2, 8, 4], recent=3)
PROFILE = CodecProfile.generic((LAYERS, HEADS, DIM))
CODECS: dict[str, Codec | None] = {
    "raw": None,
    "cachegen": make_codec("cachegen", 2, PROFILE),
}
EXPECTED: dict[str, Any] = {
    "key": SPAN.key, "fingerprint": FINGERPRINT, "shape": SHAPE, "dtype": "float16", "num_blocks": BLOCKS,
}  # fmt: skip


def values() -> np.ndarray:
    return np.random.default_rng(5).normal(size=SHAPE).astype(np.float16)


def raw_segment(fidelity: str = "tolerant") -> np.ndarray:
    header = SegmentHeader.raw(SPAN, made_up_hashes(SPAN), FINGERPRINT, SHAPE, "float16", fidelity)
    buffer = np.empty(header.sealed_bytes, np.uint8)
    buffer[header.body_offset :] = values().reshape(-1).view(np.uint8)
    seal(buffer.data, header)
    return buffer


def mass() -> np.ndarray:
    return np.random.default_rng(6).random((LAYERS, HEADS, SHAPE[2])).astype(np.float16)


def sparse(name: str = "raw", budgets: Budgets = BUDGETS) -> np.ndarray:
    return sparsified(
        raw_segment().data, key=SPAN.key, fingerprint=FINGERPRINT, mass=mass(), budgets=budgets, inner=CODECS[name]
    )


def inner_codec(name: str, level: int, profile: bytes) -> Codec | None:
    codec = CODECS[name]
    if codec is not None and (codec.level, codec.profile) != (level, profile):
        raise ValueError("no such codec")
    return codec


def opened(buffer: Any, budgets: Budgets = BUDGETS, **changed: Any) -> list[KeptLayer]:
    return list(open_sparse(buffer, budgets=budgets, inner_codec=inner_codec, **{**EXPECTED, **changed}))


def refusal(buffer: Any, budgets: Budgets = BUDGETS, **changed: Any) -> MismatchReason:
    with pytest.raises(SegmentMismatch) as refused:
        opened(buffer, budgets, **changed)
    return refused.value.reason


@pytest.mark.parametrize("name", list(CODECS))
def test_the_heaviest_tokens_of_each_layer_and_head_come_back(name: str) -> None:
    layers, whole, heavy = opened(sparse(name).data), values(), mass()
    assert [len(layer.keys) for layer in layers] == [8, 32, 16]
    for number, layer in enumerate(layers):
        for head in range(HEADS):
            kept = layer.index[head]
            assert set(kept) >= {29, 30, 31}, "the recent ones"
            left = np.setdiff1d(np.arange(29), kept)
            assert not len(left) or heavy[number, head, kept[:-3]].min() >= heavy[number, head, left].max()
            near = 0 if name == "raw" else 1.0
            assert np.abs(layer.keys[:, head] - whole[number, 0, kept, head]).max() <= near
            assert np.abs(layer.values[:, head] - whole[number, 1, kept, head]).max() <= near


def test_the_head_is_that_of_the_segment_it_was_made_of() -> None:
    header, made_of = read_header(sparse().data), read_header(raw_segment().data)
    assert (header.codec, header.level) == ("sparse", BUDGETS.header_level)
    assert replace(header, codec="raw", level=0, body_bytes=made_of.body_bytes) == made_of
    assert header.sealed_bytes < made_of.sealed_bytes
    assert verify(sparse().data, key=SPAN.key, fingerprint=FINGERPRINT) == header


@pytest.mark.parametrize("budgets", [BUDGETS, Budgets.of_eighths([8, 8, 8])], ids=["some", "all"])
def test_no_reader_of_dense_segments_takes_a_sparse_one(budgets: Budgets) -> None:
    """Not even one that kept every token."""
    buffer = sparse(budgets=budgets)
    for reader in (open_layers, open_segment):
        with pytest.raises(SegmentMismatch) as refused:
            reader(buffer.data, **EXPECTED)
        assert refused.value.reason is MismatchReason.CODEC
    with pytest.raises(ValueError, match="cannot be made dense"):
        _ = read_header(buffer.data).decoded
    inner, profiles = MemoryStore(), MemoryProfiles()
    inner.held[SPAN.key] = bytes(buffer)
    store = CodedStore(
        CheckedStore(inner, FINGERPRINT), FINGERPRINT, SegmentCodecs(CODING, profiles), profiles, CodecMeter()
    )
    with pytest.raises(SegmentMismatch) as refused:
        store.get(SPAN.key)
    assert refused.value.reason is MismatchReason.CODEC


@pytest.mark.parametrize("fidelity", ["exact", "blended"])
def test_only_tolerant_segments_lose_tokens(fidelity: str) -> None:
    with pytest.raises(SegmentMismatch) as refused:
        sparsified(
            raw_segment(fidelity).data, key=SPAN.key, fingerprint=FINGERPRINT, mass=mass(), budgets=BUDGETS, inner=None
        )
    assert refused.value.reason is MismatchReason.CODEC
    with pytest.raises(ValueError, match="no lossy form"):
        replace(read_header(sparse().data), fidelity=fidelity)


def test_a_dense_segment_and_one_of_other_budgets_are_no_sparse_one() -> None:
    assert refusal(raw_segment().data) is MismatchReason.CODEC
    assert refusal(sparse().data, Budgets.of_eighths([8, 2, 4], recent=3)) is MismatchReason.CODEC
    assert refusal(sparse().data, Budgets.of_eighths([2, 8, 4], recent=4)) is MismatchReason.CODEC, "equal counts"
    assert refusal(sparse().data, Budgets.uniform("50", LAYERS)) is MismatchReason.CODEC
    assert refusal(sparse().data, Budgets.of_eighths([2, 8], recent=3)) is MismatchReason.CODEC


def test_budgets_that_share_a_header_level_are_told_apart_by_their_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budgets, "header_level", 40_000)
    assert refusal(sparse().data, Budgets.of_eighths([4, 8, 4], recent=3)) is MismatchReason.CODEC


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"key": bytes(range(32))}, MismatchReason.KEY),
        ({"fingerprint": bytes(32)}, MismatchReason.FINGERPRINT),
        ({"shape": (LAYERS, 2, 16, HEADS, DIM)}, MismatchReason.SHAPE),
        ({"num_blocks": 2}, MismatchReason.SHAPE),
        ({"dtype": "bfloat16"}, MismatchReason.DTYPE),
    ],
)
def test_what_differs_from_the_plan_is_named(changed: dict[str, Any], reason: MismatchReason) -> None:
    assert refusal(sparse().data, **changed) is reason


@pytest.mark.parametrize("name", list(CODECS))
def test_any_flipped_bit_is_a_mismatch(name: str) -> None:
    good = sparse(name)
    random = np.random.default_rng(7)
    for at in {*range(0, 256, 5), *random.integers(0, len(good), 200).tolist(), len(good) - 1}:
        bad = good.copy()
        bad[at] ^= 1 << random.integers(8)
        with pytest.raises(SegmentMismatch):
            opened(bad.data)


def test_a_section_that_no_layer_packs_to_is_a_mismatch() -> None:
    """With all checksums right, as somebody writes it who can seal."""
    header = read_header(sparse().data)
    for sections in ([b"\0" * 8] * LAYERS, [b""] * LAYERS, [b"\xff" * 600] * LAYERS):
        start = header.body_offset
        forged = bytearray(start) + b"".join(sections)
        body = replace(header, body_bytes=len(forged) - header.head_bytes)
        seal(forged, body, [len(section) for section in sections])
        assert refusal(forged) is MismatchReason.CODEC


def test_a_codec_inside_that_the_head_does_not_name_is_refused() -> None:
    buffer = bytearray(sparse("cachegen").tobytes())
    header = read_header(buffer)
    entries = [len(section) for section in _sections(buffer)]
    seal(buffer, replace(header, profile=b"another profile!"), entries)
    assert refusal(buffer) is MismatchReason.CODEC
    plain = bytearray(sparse("raw").tobytes())
    entries = [len(section) for section in _sections(plain)]
    seal(plain, replace(read_header(plain), profile=b"another profile!"), entries)
    assert refusal(plain) is MismatchReason.PROFILE


def _sections(buffer: bytearray) -> list[memoryview]:
    layers = read_layers(bytes(buffer), key=SPAN.key, fingerprint=FINGERPRINT)
    return [layers.layer(number) for number in range(LAYERS)]


def test_mass_or_budgets_of_another_shape_are_refused() -> None:
    for heavy, budgets in ((mass()[:2], BUDGETS), (mass(), Budgets.of_eighths([8, 8]))):
        with pytest.raises(ValueError, match="not those of"):
            sparsified(
                raw_segment().data, key=SPAN.key, fingerprint=FINGERPRINT, mass=heavy, budgets=budgets, inner=None
            )
