import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.segment_format import (
    HEADER_BYTES,
    MismatchReason,
    SegmentHeader,
    SegmentMismatch,
    open_segment,
    payload_bytes,
    seal,
)

KEY, FINGERPRINT = bytes(range(32)), bytes(range(32, 64))
SHAPE, DTYPE = (2, 2, 4, 1, 8), "bfloat16"
PAYLOAD = bytes(index * 7 % 256 for index in range(payload_bytes(SHAPE, DTYPE)))
EXPECTED = {"key": KEY, "fingerprint": FINGERPRINT, "shape": SHAPE, "dtype": DTYPE}


def sealed():
    buffer = bytearray(HEADER_BYTES + len(PAYLOAD))
    buffer[HEADER_BYTES:] = PAYLOAD
    seal(buffer, SegmentHeader(KEY, FINGERPRINT, SHAPE, DTYPE, "raw", len(PAYLOAD)))
    return buffer


SEALED = bytes(sealed())


def refusal(buffer, **expected):
    with pytest.raises(SegmentMismatch) as refused:
        open_segment(buffer, **{**EXPECTED, **expected})
    return refused.value.reason


def flipped(bit):
    buffer = bytearray(SEALED)
    buffer[bit // 8] ^= 1 << bit % 8
    return buffer


@given(
    st.tuples(st.integers(1, 3), st.just(2), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9)),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.binary(min_size=32, max_size=32),
    st.randoms(use_true_random=False),
)
def test_what_was_sealed_opens_to_the_same_bytes(shape, dtype, key, random):
    payload = random.randbytes(payload_bytes(shape, dtype))
    buffer = bytearray(HEADER_BYTES) + payload
    seal(buffer, SegmentHeader(key, FINGERPRINT, shape, dtype, "raw", len(payload)))
    for readable in (buffer, bytes(buffer), memoryview(buffer)):
        assert open_segment(readable, key=key, fingerprint=FINGERPRINT, shape=shape, dtype=dtype) == payload


def test_payload_is_a_view_at_an_aligned_offset():
    buffer = sealed()
    payload = open_segment(buffer, **EXPECTED)
    assert HEADER_BYTES % 64 == 0
    assert payload.obj is buffer


def test_every_flipped_bit_of_the_header_is_refused():
    reasons = {refusal(flipped(bit)) for bit in range(HEADER_BYTES * 8)}
    assert reasons == set(MismatchReason) - {MismatchReason.TRUNCATED}


@given(st.integers(0, len(SEALED) * 8 - 1))
def test_any_flipped_bit_is_refused(bit):
    reason = refusal(flipped(bit))
    assert bit < HEADER_BYTES * 8 or reason is MismatchReason.CHECKSUM


@given(st.integers(0, len(SEALED) - 1))
def test_any_truncation_is_refused(size):
    assert refusal(SEALED[:size]) is MismatchReason.TRUNCATED


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


def test_another_segments_header_on_this_payload_is_refused():
    other = bytearray(HEADER_BYTES + len(PAYLOAD))
    seal(other, SegmentHeader(KEY, FINGERPRINT, SHAPE, DTYPE, "raw", len(PAYLOAD)))
    assert refusal(other[:HEADER_BYTES] + PAYLOAD) is MismatchReason.CHECKSUM


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": b"short"}, "32 bytes"),
        ({"codec": "zip"}, "codec"),
        ({"dtype": "int4"}, "dtype"),
        ({"shape": (2, 3, 4, 1, 8)}, "shape"),
        ({"payload_bytes": 1}, "payload|bytes"),
    ],
)
def test_a_header_that_the_format_cannot_express_is_refused(change, message):
    fields = {**EXPECTED, "codec": "raw", "payload_bytes": len(PAYLOAD), **change}
    with pytest.raises(ValueError, match=message):
        SegmentHeader(**fields)


def test_sealing_a_buffer_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="buffer has"):
        seal(bytearray(HEADER_BYTES), SegmentHeader(KEY, FINGERPRINT, SHAPE, DTYPE, "raw", len(PAYLOAD)))
