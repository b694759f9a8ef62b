"""The way of a tolerant segment to a store by its mass, and what a replica makes of the bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from memory_store import MemoryProfiles, MemoryStore
from redis_fixture import FINGERPRINT

from deployments.redis_tier import actor
from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.coded_store import CodedStore
from deployments.segment_store.segment_codecs import Coding, FormLevel, SegmentCodecs
from deployments.segment_store.segment_tail import split_tail, without_tail
from deployments.segment_store.sparse.coding import SparseCoding
from deployments.segment_store.sparse.segments import mass_bytes, mass_of, with_mass
from kvmanager.extensions.sparse.budgets import Budgets
from kvmanager.extensions.sparse.retained_prefixes import serves
from kvmanager.segments.format import MismatchReason, SegmentHeader, SegmentMismatch, open_layers, read_header, seal
from kvmanager.segments.forms import stated_form
from kvmanager.segments.keys import SegmentKey
from kvmanager.segments.spans import split_segments
from load_tests.harness.memory_port import made_up_hashes

BLOCKS, TOKENS, LAYERS, HEADS, DIM = 4, 32, 3, 2, 8
SHAPE = (LAYERS, 2, TOKENS, HEADS, DIM)
SPAN = split_segments([SegmentKey(bytes([n]) * 32) for n in range(1, BLOCKS + 1)], 0, BLOCKS, BLOCKS, BLOCKS)[0]
VALUES = np.random.default_rng(5).normal(size=SHAPE).astype(np.float16)
MASS = np.random.default_rng(6).random((LAYERS, HEADS, TOKENS)).astype(np.float16)
RAW, CACHEGEN = (Coding("raw", name, level, form=FormLevel("sparse", "50")) for name, level in
                 (("raw", 0), ("cachegen", 2)))  # fmt: skip


def sealed(fidelity: str = "tolerant") -> np.ndarray:
    header = SegmentHeader.raw(SPAN, made_up_hashes(SPAN), FINGERPRINT, SHAPE, "float16", fidelity)
    buffer = np.empty(header.sealed_bytes, np.uint8)
    buffer[header.body_offset :] = VALUES.reshape(-1).view(np.uint8)
    seal(buffer.data, header)
    return buffer


def stored_by(coding: Coding, buffer: np.ndarray) -> tuple[CodedStore, MemoryStore, int, bytes]:
    inner, profiles = MemoryStore(), MemoryProfiles()
    plain = Coding("raw", "raw" if coding.tolerant == "raw" else coding.tolerant, coding.level)
    store = CodedStore(
        CheckedStore(inner, FINGERPRINT), FINGERPRINT, SegmentCodecs(plain, profiles), profiles, CodecMeter(),
        SparseCoding(coding, FINGERPRINT),
    )  # fmt: skip
    nbytes, form = store.put_by_tail(SPAN.key, buffer.data)
    assert nbytes == len(inner.held[SPAN.key])
    return store, inner, nbytes, form


def opened(coding: Coding, held: bytes, form: bytes) -> list[Any]:
    return SparseCoding(coding, FINGERPRINT).open(
        memoryview(held), key=SPAN.key, form=form, shape=SHAPE, dtype="float16", num_blocks=BLOCKS
    )


@pytest.mark.parametrize("coding", [RAW, CACHEGEN], ids=["raw", "cachegen"])
def test_with_its_mass_it_is_sparse_and_comes_back_as_the_heaviest_tokens(coding: Coding) -> None:
    _, inner, nbytes, form = stored_by(coding, with_mass(sealed(), MASS))
    held = inner.held[SPAN.key]
    assert read_header(held).codec == "sparse"
    assert nbytes < 0.7 * len(sealed())
    assert form == stated_form(held)
    assert serves(form, Budgets.uniform("50", LAYERS))
    layers = opened(coding, held, form)
    recent = Budgets.uniform("50", LAYERS).recent
    for number, (keys, values) in enumerate(layers):
        for head in range(HEADS):
            older = MASS[number, head, : TOKENS - recent]
            heaviest = np.sort(np.argsort(-older, kind="stable")[: TOKENS // 2 - recent])
            index = [*heaviest, *range(TOKENS - recent, TOKENS)]
            for half, found in enumerate((keys, values)):
                lost = np.abs(found[:, head] - VALUES[number, half, index, head]).max()
                assert lost <= (0 if coding is RAW else 1)


@pytest.mark.parametrize("why", ["no mass", "damaged mass", "another shape", "off", "exact", "blended"])
def test_else_it_is_dense(why: str) -> None:
    buffer = with_mass(sealed(why if why in ("exact", "blended") else "tolerant"), MASS)
    if why == "no mass":
        buffer = sealed()
    if why == "damaged mass":
        buffer[-1] ^= 1
    if why == "another shape":
        buffer = with_mass(sealed(), MASS[:2])
    coding = Coding("raw", "raw", form=None) if why == "off" else RAW
    store, inner, _, form = stored_by(coding, buffer)
    assert form == b""
    assert stated_form(inner.held[SPAN.key]) == b""
    raw = store.get(SPAN.key)
    assert raw is not None
    assert bytes(raw) == bytes(without_tail(buffer.data)), "and the mass stays behind"


def test_whoever_expects_dense_kv_refuses_it_and_the_other_way_round() -> None:
    store, inner, _, form = stored_by(RAW, with_mass(sealed(), MASS))
    held = inner.held[SPAN.key]
    expected: Any = {
        "key": SPAN.key, "fingerprint": FINGERPRINT, "shape": SHAPE, "dtype": "float16", "num_blocks": BLOCKS,
    }  # fmt: skip
    for read in (
        lambda: open_layers(held, **expected),
        lambda: store.get(SPAN.key),
        lambda: opened(RAW, held, b""),
        lambda: opened(RAW, bytes(sealed()), form),
        lambda: opened(RAW, held, form[:-1] + bytes([form[-1] ^ 1])),
        lambda: opened(Coding("raw", "raw", form=FormLevel("sparse", "20")), held, form),
        lambda: opened(Coding("raw", "raw"), held, form),
    ):
        with pytest.raises(SegmentMismatch) as mismatch:
            read()
        assert mismatch.value.reason is MismatchReason.CODEC


def test_a_dense_segment_of_a_sparse_prefix_comes_whole() -> None:
    layers = opened(RAW, bytes(sealed()), b"")
    assert (np.array(layers) == VALUES).all()


@pytest.mark.parametrize("at", range(0, 4000, 331))
def test_a_damaged_one_is_not_opened(at: int) -> None:
    _, inner, _, form = stored_by(RAW, with_mass(sealed(), MASS))
    held = bytearray(inner.held[SPAN.key])
    held[at % len(held)] ^= 1
    with pytest.raises(SegmentMismatch):
        opened(RAW, bytes(held), form)


@pytest.mark.parametrize(("level", "is_kept"), [("50", True), ("20", False), ("off", False)])
def test_an_index_has_no_sparse_segment_that_nobody_presents_any_more(
    monkeypatch: pytest.MonkeyPatch, level: str, is_kept: bool
) -> None:
    _, inner, _, form = stored_by(RAW, with_mass(sealed(), MASS))
    monkeypatch.setattr(actor, "open_store", lambda endpoint: CheckedStore(inner, FINGERPRINT))
    coding = Coding("raw", "raw", form=None if level == "off" else FormLevel("sparse", level))
    endpoint: Any = SimpleNamespace(coding=coding, fingerprint=FINGERPRINT)
    found = actor.read_index(endpoint)
    assert [header.key for header in found.headers] == ([SPAN.key] if is_kept else [])
    assert found.unusable == ([] if is_kept else [SPAN.key])
    assert found.forms == {SPAN.key: form}


def test_the_mass_lies_behind_the_segment_and_is_told_from_it() -> None:
    buffer = with_mass(sealed(), MASS)
    assert len(buffer) == len(sealed()) + mass_bytes(LAYERS, HEADS, TOKENS)
    segment, tail = split_tail(buffer.data)
    assert bytes(segment) == bytes(sealed())
    assert tail is not None
    mass = mass_of(tail, SHAPE)
    assert mass is not None
    assert (mass == MASS).all()
    for other in (sealed().data, memoryview(b"no segment at all"), memoryview(bytes(sealed()) + b"more")):
        assert (without_tail(other) is other, split_tail(other)[1]) == (True, None)
