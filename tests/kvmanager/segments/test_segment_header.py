"""What a stored segment says of itself, and what is refused of it."""

from dataclasses import replace

import pytest
from sealed_examples import (
    CODED,
    CODED_HEADER,
    CODED_START,
    DTYPE,
    FINGERPRINT,
    HEAD,
    HEADER,
    KEY,
    LAYERS,
    PARENT,
    PAYLOAD,
    PROFILE,
    SEALED,
    SECRET,
    SHAPE,
    SPAN,
    TENANT,
    flipped,
    forged,
    header_refusal,
    refusal,
)

from kvmanager.segments.format import (
    SLACK_BYTES,
    MismatchReason,
    SegmentHeader,
    body_offset,
    coded_body_offset,
    head_bytes,
    read_header,
    seal,
    stated_body_bytes,
)
from kvmanager.segments.keys import tenant_tag
from kvmanager.segments.spans import NodeKind, SegmentSpan


def test_every_flipped_bit_of_the_head_is_refused():
    for bit in range(HEAD * 8):
        reason = refusal(flipped(bit))
        if bit // 8 in range(40, 44):  # how many blocks there are, and with them how long the head is
            assert reason in (MismatchReason.HEADER, MismatchReason.TRUNCATED)
            continue
        assert reason is header_refusal(flipped(bit)[:HEAD])
        magic_or_version = {range(8): MismatchReason.MAGIC, range(8, 10): MismatchReason.VERSION}
        expected = [found for place, found in magic_or_version.items() if bit // 8 in place]
        assert reason is (expected[0] if expected else MismatchReason.HEADER)


def test_the_place_of_a_segment_is_read_from_its_head_alone():
    assert read_header(SEALED[:HEAD]) == HEADER
    assert HEADER.span == SPAN
    assert read_header(CODED[:HEAD]) == CODED_HEADER
    assert CODED_HEADER.span == SPAN


def test_the_first_segment_has_no_parent():
    span = SegmentSpan(KEY, None, 0, 4, NodeKind.REQUEST, bytes(24) + KEY[:8])
    header = SegmentHeader.raw(span, bytes(96) + KEY, FINGERPRINT, SHAPE, DTYPE)
    buffer = bytearray(header.sealed_bytes)
    seal(buffer, header)
    assert read_header(buffer).parent is None
    assert read_header(buffer).span.tenant == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({10: b"\x09"}, MismatchReason.DTYPE),
        ({12: b"\x06"}, MismatchReason.CODEC),  # unknown
        ({12: b"\x02"}, MismatchReason.CODEC),  # of an earlier version
        ({12: b"\x04"}, MismatchReason.HEADER),  # an exact segment in a lossy form
        ({14: b"\x00"}, MismatchReason.KIND),
        ({14: b"\x04"}, MismatchReason.KIND),
        ({20: b"\x03"}, MismatchReason.HEADER),  # three halves
        ({16: bytes(4)}, MismatchReason.HEADER),  # no layers
        ({40: bytes(4)}, MismatchReason.HEADER),  # no blocks
        ({40: b"\x03"}, MismatchReason.HEADER),  # 4 tokens in 3 blocks, of which the last is not the key's
        ({40: b"\x01\x04"}, MismatchReason.HEADER),  # more blocks than any segment has
        ({56: PARENT}, MismatchReason.HEADER),  # another key than the last block's hash
        ({288: PARENT}, MismatchReason.HEADER),  # and the other way round
        ({36: bytes(4)}, MismatchReason.HEADER),  # a parent before block 0
        ({88: bytes(32)}, MismatchReason.HEADER),  # no parent, but not block 0
        ({88: KEY}, MismatchReason.HEADER),  # its own parent
        ({36: b"\xff" * 4}, MismatchReason.HEADER),  # ends beyond the last number
        ({48: b"\x01"}, MismatchReason.HEADER),  # another length than the shape's
        ({44: b"\x01"}, MismatchReason.HEADER),  # a level of what has none
        ({46: b"\x03"}, MismatchReason.HEADER),  # an unknown fidelity
        ({160: b"\x01"}, MismatchReason.HEADER),  # a profile of what has none
        ({192: b"\x01"}, MismatchReason.HEADER),  # zeros that are none
    ],
)
def test_an_impossible_header_is_refused_although_its_checksum_is_right(changes, reason):
    assert header_refusal(forged(changes)) is reason


def test_a_body_is_at_most_a_little_larger_than_the_raw_one():
    least = CODED_START - HEAD
    most = least + len(PAYLOAD) + LAYERS * SLACK_BYTES
    assert replace(CODED_HEADER, body_bytes=most).body_bytes == most
    for body_bytes in (most + 1, least - 1, -1):
        with pytest.raises(ValueError, match="body"):
            replace(CODED_HEADER, body_bytes=body_bytes)


BODY_OF_THREE = body_offset(SHAPE, DTYPE, 3) - head_bytes(3) + len(PAYLOAD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_hashes": b"short"}, "32 bytes"),
        ({"block_hashes": b""}, "1 to 1024 blocks"),
        ({"block_hashes": bytes(32 * 1025)}, "1 to 1024 blocks"),
        ({"block_hashes": bytes(96)}, "body"),
        ({"tenant": "acme"}, "tenant tag"),
        ({"tenant": tenant_tag(SECRET, "acme").upper()}, "tenant tag"),
        ({"tenant": "0" * 16}, "tenant tag"),
        ({"codec": "zip"}, "codec"),
        ({"codec": "cachegen"}, "exact there is no lossy form"),
        ({"codec": "cachegen", "fidelity": "blended"}, "blended there is no lossy form"),
        ({"codec": "lossless", "level": 1}, "level"),
        ({"level": 1}, "level"),
        ({"codec": "cachegen", "fidelity": "tolerant", "level": -1}, "level"),
        ({"codec": "cachegen", "fidelity": "tolerant", "level": 2**16}, "level"),
        ({"codec": "cachegen", "fidelity": "tolerant", "profile": b"short"}, "16 bytes"),
        ({"codec": "cachegen", "fidelity": "tolerant", "profile": bytes(16)}, "16 bytes"),
        ({"codec": "lossless", "profile": PROFILE}, "lossy"),
        ({"fidelity": "roughly"}, "fidelity"),
        ({"dtype": "int4"}, "dtype"),
        ({"shape": (2, 3, 4, 1, 8)}, "shape"),
        ({"shape": (2, 1, 4, 2, 8)}, "of latents"),
        (
            {
                "shape": (2, 1, 4, 1, 16),
                "codec": "cachegen",
                "fidelity": "tolerant",
                "body_bytes": coded_body_offset(2, 2) - head_bytes(2),
            },
            "of latents there is no lossy form such as cachegen",
        ),
        ({"body_bytes": 1}, "body"),
        ({"parent": b"short"}, "32 bytes"),
        ({"parent": bytes(32)}, "zero"),
        ({"parent": b""}, "not zero"),
        ({"parent": KEY}, "another segment"),
        ({"parent": None}, "no parent"),
        ({"start_block": 0}, "no parent"),
        ({"start_block": -1}, "block 0"),
        (
            {
                "block_hashes": bytes(64) + KEY,
                "body_bytes": body_offset(SHAPE, DTYPE, 3) - head_bytes(3) + len(PAYLOAD),
            },
            "one size",
        ),
        ({"start_block": 2**32 - 1}, "numbers up to"),
        ({"shape": (2**32, 2, 4, 1, 8), "body_bytes": 2**39 + 32 * 2**32}, "numbers up to"),
        ({"shape": (1, 2, 2**30, 2**16, 2**16), "body_bytes": 2**64 + 64}, "numbers up to"),
    ],
)
def test_a_header_that_the_format_cannot_express_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(HEADER, **change)


def test_hashes_that_are_not_the_spans_are_refused():
    for hashes in (KEY, PARENT + KEY + KEY, KEY + PARENT):
        with pytest.raises(ValueError, match="not the hashes"):
            SegmentHeader.raw(SPAN, hashes, FINGERPRINT, SHAPE, DTYPE)


def test_a_segment_of_the_version_before_is_refused_by_name():
    assert header_refusal(forged({8: b"\x03"})) is MismatchReason.VERSION
    assert stated_body_bytes(forged({8: b"\x03"})) is None


def test_the_tag_of_a_tenant_survives_in_the_header_and_does_not_tell_the_name():
    assert read_header(SEALED).tenant == TENANT == tenant_tag(SECRET, "acme") != tenant_tag(SECRET, "acm")
    assert b"acme" not in SEALED
