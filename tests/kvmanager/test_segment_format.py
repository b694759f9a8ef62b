import struct
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import assume, given

from kvmanager.segment_format import (
    HEADER_BYTES,
    MismatchReason,
    SegmentHeader,
    SegmentMismatch,
    open_segment,
    payload_bytes,
    read_header,
    seal,
    verify,
)
from kvmanager.segments import NodeKind, SegmentSpan

KEY, FINGERPRINT, PARENT = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
SHAPE, DTYPE = (2, 2, 4, 1, 8), "bfloat16"
PAYLOAD = bytes(index * 7 % 256 for index in range(payload_bytes(SHAPE, DTYPE)))
EXPECTED = {"key": KEY, "fingerprint": FINGERPRINT, "shape": SHAPE, "dtype": DTYPE}
NAMED = {"key": KEY, "fingerprint": FINGERPRINT}
HEADER = SegmentHeader(KEY, FINGERPRINT, SHAPE, DTYPE, "raw", len(PAYLOAD), PARENT, 6, 2, NodeKind.ANSWER)


def sealed():
    buffer = bytearray(HEADER_BYTES + len(PAYLOAD))
    buffer[HEADER_BYTES:] = PAYLOAD
    seal(buffer, HEADER)
    return buffer


SEALED = bytes(sealed())


def refusal(buffer, **expected):
    with pytest.raises(SegmentMismatch) as refused:
        open_segment(buffer, **{**EXPECTED, **expected})
    if not {"shape", "dtype"} & expected.keys():  # which `verify` does not compare
        with pytest.raises(SegmentMismatch) as unverified:
            verify(buffer, **{**NAMED, **expected})
        assert unverified.value.reason is refused.value.reason
    return refused.value.reason


def header_refusal(buffer):
    with pytest.raises(SegmentMismatch) as refused:
        read_header(buffer)
    return refused.value.reason


def flipped(bit):
    buffer = bytearray(SEALED)
    buffer[bit // 8] ^= 1 << bit % 8
    return buffer


def forged(changes):
    """A sealed segment with other bytes at some offsets of the header, whose checksum is right all the same."""
    buffer = bytearray(SEALED)
    for offset, value in changes.items():
        buffer[offset : offset + len(value)] = value
    buffer[176:192] = xxhash.xxh3_128_digest(buffer[:176])
    return buffer


def outcome(read, *arguments, **expected):
    try:
        return read(*arguments, **expected)
    except SegmentMismatch as refused:
        return refused


@given(
    st.tuples(st.integers(1, 3), st.just(2), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9)),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.binary(min_size=32, max_size=32),
    st.randoms(use_true_random=False),
)
def test_what_was_sealed_opens_to_the_same_bytes(shape, dtype, key, random):
    payload = random.randbytes(payload_bytes(shape, dtype))
    buffer = bytearray(HEADER_BYTES) + payload
    assume(key != PARENT)
    header = SegmentHeader(key, FINGERPRINT, shape, dtype, "raw", len(payload), PARENT, 1, 1, NodeKind.REQUEST)
    seal(buffer, header)
    for readable in (buffer, bytes(buffer), memoryview(buffer)):
        assert open_segment(readable, key=key, fingerprint=FINGERPRINT, shape=shape, dtype=dtype) == payload
        assert verify(readable, key=key, fingerprint=FINGERPRINT) == header
    assert header.sealed_bytes == len(buffer)


def test_payload_is_a_view_at_an_aligned_offset():
    buffer = sealed()
    payload = open_segment(buffer, **EXPECTED)
    assert HEADER_BYTES % 64 == 0
    assert payload.obj is buffer


def test_every_flipped_bit_of_the_header_is_refused():
    for bit in range(HEADER_BYTES * 8):
        reason = refusal(flipped(bit))
        assert reason is header_refusal(flipped(bit)[:HEADER_BYTES])
        magic_or_version = {range(8): MismatchReason.MAGIC, range(8, 10): MismatchReason.VERSION}
        expected = [found for place, found in magic_or_version.items() if bit // 8 in place]
        assert reason is (expected[0] if expected else MismatchReason.HEADER)


@given(st.integers(0, len(SEALED) * 8 - 1))
def test_any_flipped_bit_is_refused(bit):
    reason = refusal(flipped(bit))
    assert bit < HEADER_BYTES * 8 or reason is MismatchReason.CHECKSUM


@given(st.integers(0, len(SEALED) - 1))
def test_any_truncation_is_refused(size):
    assert refusal(SEALED[:size]) is MismatchReason.TRUNCATED
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


def test_the_place_of_a_segment_is_read_from_its_header_alone():
    header = read_header(SEALED[:HEADER_BYTES])
    assert header == HEADER
    assert header.span == SegmentSpan(KEY, PARENT, 6, 2, NodeKind.ANSWER)


def test_the_first_segment_has_no_parent():
    header = SegmentHeader(KEY, FINGERPRINT, SHAPE, DTYPE, "raw", len(PAYLOAD), None, 0, 4, NodeKind.REQUEST)
    buffer = bytearray(header.sealed_bytes)
    seal(buffer, header)
    assert read_header(buffer).parent is None


def test_the_offsets_are_those_of_the_table():
    # Redis outlives releases: a change of the layout needs a new version.
    fields = struct.unpack_from("<8sHHHH5I3IQ32s32s32s8s16s16s", SEALED)
    assert fields[:5] == (b"CROSSKV\0", 2, 2, 0, 2)
    assert fields[5:14] == (*SHAPE, 6, 2, 0, len(PAYLOAD))
    assert fields[14:18] == (KEY, PARENT, FINGERPRINT, bytes(8))
    assert fields[18:] == (xxhash.xxh3_128_digest(PAYLOAD), xxhash.xxh3_128_digest(SEALED[:176]))


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_and_nothing_else_happens(noise):
    assert header_refusal(noise) in (MismatchReason.TRUNCATED, MismatchReason.MAGIC)
    assert refusal(noise) is header_refusal(noise)


@given(st.dictionaries(st.integers(0, 159), st.binary(min_size=1, max_size=8), max_size=4))
def test_a_forged_header_never_raises_anything_but_a_mismatch(changes):
    buffer = forged({offset: value[: 160 - offset] for offset, value in changes.items()})
    for found in (outcome(read_header, buffer), outcome(read_header, buffer[:HEADER_BYTES])):
        assert isinstance(found, SegmentHeader | SegmentMismatch)
    assert isinstance(outcome(verify, buffer, **NAMED), SegmentHeader | SegmentMismatch)
    assert isinstance(outcome(open_segment, buffer, **EXPECTED), memoryview | SegmentMismatch)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({10: b"\x09"}, MismatchReason.DTYPE),
        ({12: b"\x01"}, MismatchReason.CODEC),
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
        ({44: b"\x01"}, MismatchReason.HEADER),  # zeros that are none
        ({159: b"\x01"}, MismatchReason.HEADER),
    ],
)
def test_an_impossible_header_is_refused_although_its_checksum_is_right(changes, reason):
    assert header_refusal(forged(changes)) is reason


def test_another_segments_header_on_this_payload_is_refused():
    other = bytearray(HEADER_BYTES + len(PAYLOAD))
    seal(other, HEADER)
    assert refusal(other[:HEADER_BYTES] + PAYLOAD) is MismatchReason.CHECKSUM


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": b"short"}, "32 bytes"),
        ({"codec": "zip"}, "codec"),
        ({"dtype": "int4"}, "dtype"),
        ({"shape": (2, 3, 4, 1, 8)}, "shape"),
        ({"payload_bytes": 1}, "payload|bytes"),
        ({"parent": b"short"}, "32 bytes"),
        ({"parent": bytes(32)}, "zero"),
        ({"parent": b""}, "not zero"),
        ({"parent": KEY}, "another segment"),
        ({"parent": None}, "no parent"),
        ({"start_block": 0}, "no parent"),
        ({"start_block": -1}, "block 0"),
        ({"num_blocks": 0}, "at least one block"),
        ({"num_blocks": 3}, "blocks of one size"),
        ({"start_block": 2**32 - 1}, "numbers up to"),
        ({"shape": (2**32, 2, 4, 1, 8), "payload_bytes": 2**39}, "numbers up to"),
        ({"shape": (2**31, 2, 4, 2**15, 2**15), "payload_bytes": 2**65}, "numbers up to"),
    ],
)
def test_a_header_that_the_format_cannot_express_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(HEADER, **change)


def test_sealing_a_buffer_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="buffer has"):
        seal(bytearray(HEADER_BYTES), HEADER)
