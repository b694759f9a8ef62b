import struct
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import assume, given
from sealed_examples import (
    CODED,
    CODED_HEADER,
    DTYPE,
    EXPECTED,
    FINGERPRINT,
    HEADER,
    KEY,
    LAYER_BYTES,
    LAYERS,
    NAMED,
    PARENT,
    PAYLOAD,
    PROFILE,
    SEALED,
    SECRET,
    SECTIONS,
    SHAPE,
    SHAPES,
    SPAN,
    START,
    TENANT,
    coded,
    flipped,
    forged,
    header_refusal,
    outcome,
    refusal,
    sealed,
)

from kvmanager.segments.format import (
    HEADER_BYTES,
    LOSSY_CODECS,
    SLACK_BYTES,
    MismatchReason,
    SegmentHeader,
    SegmentLayers,
    SegmentMismatch,
    SegmentSealer,
    body_offset,
    open_layers,
    open_segment,
    payload_bytes,
    read_header,
    read_layers,
    seal,
    sealed_bytes,
    stated_body_bytes,
    table_bytes,
    verify,
)
from kvmanager.segments.keys import tenant_tag
from kvmanager.segments.spans import NodeKind, SegmentSpan


@given(
    SHAPES,
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.binary(min_size=32, max_size=32),
    st.randoms(use_true_random=False),
)
def test_what_was_sealed_opens_to_the_same_bytes(shape, dtype, key, random):
    assume(key != PARENT)
    payload = random.randbytes(payload_bytes(shape, dtype))
    buffer = bytearray(body_offset(shape[0])) + payload
    header = SegmentHeader.raw(SegmentSpan(key, PARENT, 1, 1, NodeKind.REQUEST, key[:8]), FINGERPRINT, shape, dtype)
    seal(buffer, header)
    expected = {"key": key, "fingerprint": FINGERPRINT, "shape": shape, "dtype": dtype}
    for readable in (buffer, bytes(buffer), memoryview(buffer)):
        assert open_segment(readable, **expected) == payload
        layers = open_layers(readable, **expected)
        assert b"".join(layers.layer(index) for index in range(shape[0])) == payload
        assert verify(readable, key=key, fingerprint=FINGERPRINT) == header
    assert header.sealed_bytes == header.raw_sealed_bytes == sealed_bytes(shape, dtype) == len(buffer)
    assert stated_body_bytes(bytes(buffer[:HEADER_BYTES])) == len(buffer) - HEADER_BYTES


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=6),
    st.sampled_from(["lossless", "int8", "cachegen"]),
    st.integers(0, 3),
)
def test_coded_sections_of_any_lengths_come_back_one_by_one(sections, codec, level):
    shape = (len(sections), 2, 4, 1, 8)
    lossy = codec in LOSSY_CODECS
    header = SegmentHeader(
        KEY, FINGERPRINT, shape, DTYPE, table_bytes(len(sections)) + sum(map(len, sections)), PARENT, 6, 2,
        NodeKind.ANSWER, TENANT, codec, level if lossy else 0, "tolerant", PROFILE if lossy else b"",
    )  # fmt: skip
    buffer = bytearray(body_offset(len(sections))) + b"".join(sections)
    seal(buffer, header, [len(section) for section in sections])
    layers = read_layers(bytes(buffer), **NAMED)
    assert layers.header == header == verify(buffer, **NAMED)
    assert [bytes(layers.layer(index)) for index in range(len(layers))] == sections
    assert header.decoded == SegmentHeader.raw(SPAN, FINGERPRINT, shape, DTYPE, "tolerant")
    assert header.raw_sealed_bytes == sealed_bytes(shape, DTYPE)


def test_sealing_layer_by_layer_gives_the_same_bytes():
    buffer = bytearray(b"\xff" * START) + PAYLOAD
    sealer = SegmentSealer(buffer, HEADER)
    for _ in range(LAYERS):
        sealer.add()
    sealer.finish()
    assert buffer == SEALED


def test_sections_are_views_at_an_aligned_offset():
    buffer = sealed()
    assert open_segment(buffer, **EXPECTED).obj is buffer
    assert open_layers(buffer, **EXPECTED).layer(1).obj is buffer
    assert {body_offset(layers) % 64 for layers in range(1, 100)} == {0}


def test_every_flipped_bit_of_the_header_is_refused():
    for bit in range(HEADER_BYTES * 8):
        reason = refusal(flipped(bit))
        assert reason is header_refusal(flipped(bit)[:HEADER_BYTES])
        magic_or_version = {range(8): MismatchReason.MAGIC, range(8, 10): MismatchReason.VERSION}
        expected = [found for place, found in magic_or_version.items() if bit // 8 in place]
        assert reason is (expected[0] if expected else MismatchReason.HEADER)


def test_every_flipped_bit_of_the_table_is_refused_before_any_layer_is_read():
    for buffer, read in ((SEALED, open_layers), (CODED, read_layers)):
        for bit in range(HEADER_BYTES * 8, START * 8):
            refused = outcome(read, flipped(bit, buffer), **(EXPECTED if read is open_layers else NAMED))
            assert refused.reason is MismatchReason.CHECKSUM


def test_every_flipped_bit_of_a_section_refuses_that_layer_and_the_whole_but_no_other_layer():
    for bit in range(START * 8, len(SEALED) * 8):
        buffer = flipped(bit)
        damaged = (bit // 8 - START) // LAYER_BYTES
        layers = open_layers(buffer, **EXPECTED)
        for index in range(LAYERS):
            found = outcome(layers.layer, index)
            if index == damaged:
                assert found.reason is MismatchReason.CHECKSUM
            else:
                assert found == PAYLOAD[index * LAYER_BYTES :][:LAYER_BYTES]
        assert refusal(buffer) is MismatchReason.CHECKSUM


@given(st.integers(0, len(CODED) * 8 - 1))
def test_any_flipped_bit_of_a_coded_segment_is_refused(bit):
    assert isinstance(outcome(verify, flipped(bit, CODED), **NAMED), SegmentMismatch)


@given(st.integers(0, len(SEALED) - 1))
def test_any_truncation_is_refused(size):
    assert refusal(SEALED[:size]) is MismatchReason.TRUNCATED
    assert outcome(open_layers, SEALED[:size], **EXPECTED).reason is MismatchReason.TRUNCATED
    if size < HEADER_BYTES:
        assert header_refusal(SEALED[:size]) is MismatchReason.TRUNCATED


def test_an_empty_array_is_refused():
    assert header_refusal(np.empty(0, np.uint8).data) is MismatchReason.TRUNCATED


@given(st.binary(min_size=1, max_size=200))
def test_any_extension_is_refused(tail):
    assert refusal(SEALED + tail) is MismatchReason.LENGTH


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        ({"key": FINGERPRINT}, MismatchReason.KEY),
        ({"fingerprint": KEY}, MismatchReason.FINGERPRINT),
        ({"shape": (2, 2, 8, 1, 4)}, MismatchReason.SHAPE),
        ({"shape": (2, 2, 4, 1, 16)}, MismatchReason.SHAPE),
        ({"dtype": "float16"}, MismatchReason.DTYPE),
        ({"dtype": "float32"}, MismatchReason.DTYPE),
    ],
)
def test_a_segment_that_is_not_the_expected_one_is_refused(expected, reason):
    assert refusal(SEALED, **expected) is reason


def test_coded_layers_are_never_taken_for_raw_ones():
    _, same_size = coded([PAYLOAD[:LAYER_BYTES], PAYLOAD[LAYER_BYTES:]])
    for buffer in (CODED, same_size):
        for read in (open_layers, open_segment):
            assert outcome(read, buffer, **EXPECTED).reason is MismatchReason.CODEC


def test_the_place_of_a_segment_is_read_from_its_header_alone():
    assert read_header(SEALED[:HEADER_BYTES]) == HEADER
    assert HEADER.span == SPAN
    assert read_header(CODED[:HEADER_BYTES]) == CODED_HEADER
    assert CODED_HEADER.span == SPAN


def test_the_first_segment_has_no_parent():
    span = SegmentSpan(KEY, None, 0, 4, NodeKind.REQUEST, bytes(24) + KEY[:8])
    header = SegmentHeader.raw(span, FINGERPRINT, SHAPE, DTYPE)
    buffer = bytearray(header.sealed_bytes)
    seal(buffer, header)
    assert read_header(buffer).parent is None
    assert read_header(buffer).span.tenant == ""


def test_the_offsets_are_those_of_the_table():
    # Redis outlives releases: a change of the layout needs a new version.
    fields = struct.unpack_from("<8sHHHH5I2IHBBQ32s32s32s8s16s16s48s16s", CODED)
    assert fields[:5] == (b"CROSSKV\0", 5, 2, 4, 2)
    assert fields[5:16] == (*SHAPE, 6, 2, 2, 1, 0, len(CODED) - HEADER_BYTES)
    assert fields[16:21] == (KEY, PARENT, FINGERPRINT, bytes.fromhex(TENANT), PROFILE)
    assert fields[21:] == (xxhash.xxh3_128_digest(CODED[256:320]), bytes(48), xxhash.xxh3_128_digest(CODED[:240]))
    entries = [(len(section), xxhash.xxh3_128_digest(section)) for section in SECTIONS]
    assert [*struct.iter_unpack("<Q16s", CODED[256:304])] == entries
    assert CODED[304:320] == bytes(16)
    assert CODED[320:] == b"".join(SECTIONS)
    assert struct.unpack_from("<QHHHH5I2IHH", SEALED)[3] == 0


@given(st.binary(max_size=600))
def test_random_bytes_are_refused_and_nothing_else_happens(noise):
    assert header_refusal(noise) in (MismatchReason.TRUNCATED, MismatchReason.MAGIC)
    assert refusal(noise) is header_refusal(noise)


@given(
    st.sampled_from([SEALED, CODED]),
    st.dictionaries(st.integers(0, START - 1), st.binary(min_size=1, max_size=8), max_size=4),
)
def test_a_forged_header_or_table_never_raises_anything_but_a_mismatch(buffer, changes):
    buffer = forged({offset: value[: START - offset] for offset, value in changes.items()}, buffer)
    for found in (outcome(read_header, buffer), outcome(read_header, buffer[:HEADER_BYTES])):
        assert isinstance(found, SegmentHeader | SegmentMismatch)
    assert isinstance(outcome(verify, buffer, **NAMED), SegmentHeader | SegmentMismatch)
    assert isinstance(outcome(open_segment, buffer, **EXPECTED), memoryview | SegmentMismatch)
    assert isinstance(outcome(open_layers, buffer, **EXPECTED), SegmentLayers | SegmentMismatch)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({10: b"\x09"}, MismatchReason.DTYPE),
        ({12: b"\x05"}, MismatchReason.CODEC),  # unknown
        ({12: b"\x02"}, MismatchReason.HEADER),  # an exact segment in a lossy form
        ({14: b"\x00"}, MismatchReason.KIND),
        ({14: b"\x03"}, MismatchReason.KIND),
        ({20: b"\x03"}, MismatchReason.HEADER),  # three halves
        ({16: bytes(4)}, MismatchReason.HEADER),  # no layers
        ({40: bytes(4)}, MismatchReason.HEADER),  # no blocks
        ({40: b"\x03"}, MismatchReason.HEADER),  # 4 tokens in 3 blocks
        ({36: bytes(4)}, MismatchReason.HEADER),  # a parent before block 0
        ({88: bytes(32)}, MismatchReason.HEADER),  # no parent, but not block 0
        ({88: KEY}, MismatchReason.HEADER),  # its own parent
        ({36: b"\xff" * 4}, MismatchReason.HEADER),  # ends beyond the last number
        ({48: b"\x01"}, MismatchReason.HEADER),  # another length than the shape's
        ({44: b"\x01"}, MismatchReason.HEADER),  # a level of what has none
        ({46: b"\x02"}, MismatchReason.HEADER),  # an unknown fidelity
        ({160: b"\x01"}, MismatchReason.HEADER),  # a profile of what has none
        ({192: b"\x01"}, MismatchReason.HEADER),  # zeros that are none
    ],
)
def test_an_impossible_header_is_refused_although_its_checksum_is_right(changes, reason):
    assert header_refusal(forged(changes)) is reason


@pytest.mark.parametrize(
    "lengths", [(LAYER_BYTES - 1, LAYER_BYTES + 1), (0, 2 * LAYER_BYTES), (2**64 - 1, LAYER_BYTES)]
)
def test_a_raw_segments_table_of_other_lengths_is_refused_although_its_checksum_is_right(lengths):
    changes = {HEADER_BYTES + 24 * index: struct.pack("<Q", length) for index, length in enumerate(lengths)}
    assert refusal(forged(changes)) is MismatchReason.LENGTH


@pytest.mark.parametrize("lengths", [(22, 1), (21, 0), (23, 0), (2**64 - 1, 0), (2**63, 2**63)])
def test_a_table_that_is_not_the_bodys_is_refused_although_its_checksum_is_right(lengths):
    changes = {HEADER_BYTES + 24 * index: struct.pack("<Q", length) for index, length in enumerate(lengths)}
    assert outcome(read_layers, forged(changes, CODED), **NAMED).reason is MismatchReason.LENGTH


@pytest.mark.parametrize("layers", [3, 1000, 2**32 - 1])
def test_nothing_is_allocated_for_layers_that_a_header_merely_states(layers):
    body_bytes = table_bytes(layers) + layers * LAYER_BYTES
    changes = {16: struct.pack("<I", layers), 48: struct.pack("<Q", body_bytes)}
    assert outcome(read_layers, forged(changes), **NAMED).reason is MismatchReason.TRUNCATED


def test_a_body_is_at_most_a_little_larger_than_the_raw_one():
    most = table_bytes(LAYERS) + len(PAYLOAD) + LAYERS * SLACK_BYTES
    assert replace(CODED_HEADER, body_bytes=most).body_bytes == most
    for body_bytes in (most + 1, table_bytes(LAYERS) - 1, -1):
        with pytest.raises(ValueError, match="body"):
            replace(CODED_HEADER, body_bytes=body_bytes)


def test_another_segments_header_on_these_layers_is_refused():
    other = bytearray(len(SEALED))
    seal(other, HEADER)
    assert refusal(other[:HEADER_BYTES] + SEALED[HEADER_BYTES:]) is MismatchReason.CHECKSUM
    assert refusal(other[:START] + PAYLOAD) is MismatchReason.CHECKSUM


def test_two_layers_that_changed_places_are_refused():
    swapped = SEALED[:START] + PAYLOAD[LAYER_BYTES:] + PAYLOAD[:LAYER_BYTES]
    assert refusal(swapped) is MismatchReason.CHECKSUM


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": b"short"}, "32 bytes"),
        ({"tenant": "acme"}, "tenant tag"),
        ({"tenant": tenant_tag(SECRET, "acme").upper()}, "tenant tag"),
        ({"tenant": "0" * 16}, "tenant tag"),
        ({"codec": "zip"}, "codec"),
        ({"codec": "int8"}, "exact segment has no lossy form"),
        ({"codec": "lossless", "level": 1}, "level"),
        ({"level": 1}, "level"),
        ({"codec": "int8", "fidelity": "tolerant", "level": -1}, "level"),
        ({"codec": "int8", "fidelity": "tolerant", "level": 2**16}, "level"),
        ({"codec": "cachegen", "fidelity": "tolerant", "profile": b"short"}, "16 bytes"),
        ({"codec": "cachegen", "fidelity": "tolerant", "profile": bytes(16)}, "16 bytes"),
        ({"codec": "lossless", "profile": PROFILE}, "lossy"),
        ({"fidelity": "roughly"}, "fidelity"),
        ({"dtype": "int4"}, "dtype"),
        ({"shape": (2, 3, 4, 1, 8)}, "shape"),
        ({"body_bytes": 1}, "body"),
        ({"parent": b"short"}, "32 bytes"),
        ({"parent": bytes(32)}, "zero"),
        ({"parent": b""}, "not zero"),
        ({"parent": KEY}, "another segment"),
        ({"parent": None}, "no parent"),
        ({"start_block": 0}, "no parent"),
        ({"start_block": -1}, "block 0"),
        ({"num_blocks": 0}, "at least one block"),
        ({"num_blocks": 3}, "3 of one size"),
        ({"start_block": 2**32 - 1}, "numbers up to"),
        ({"shape": (2**32, 2, 4, 1, 8), "body_bytes": 2**39 + 24 * 2**32}, "numbers up to"),
        ({"shape": (1, 2, 2**30, 2**16, 2**16), "body_bytes": 2**64 + 64}, "numbers up to"),
    ],
)
def test_a_header_that_the_format_cannot_express_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(HEADER, **change)


def test_sealing_what_is_not_the_headers_size_is_refused():
    with pytest.raises(ValueError, match="buffer has"):
        seal(bytearray(HEADER_BYTES), HEADER)
    for section_bytes in ([5, 5], [len(CODED), 0], [-1, 23]):
        with pytest.raises(ValueError, match="section"):
            seal(bytearray(CODED), CODED_HEADER, section_bytes)
    unfinished = SegmentSealer(bytearray(SEALED), HEADER)
    unfinished.add()
    with pytest.raises(ValueError, match="1 sections"):
        unfinished.finish()
    unfinished.add()
    with pytest.raises(ValueError, match="does not fit"):
        unfinished.add()


def test_a_segment_of_the_version_before_is_refused_by_name():
    assert header_refusal(forged({8: b"\x03"})) is MismatchReason.VERSION
    assert stated_body_bytes(forged({8: b"\x03"})) is None


def test_the_tag_of_a_tenant_survives_in_the_header_and_does_not_tell_the_name():
    assert read_header(SEALED).tenant == TENANT == tenant_tag(SECRET, "acme") != tenant_tag(SECRET, "acm")
    assert b"acme" not in SEALED
