"""A sealed segment, a coded one, and ways to damage or forge them."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import xxhash

from kvmanager.segments.format import (
    SegmentHeader,
    SegmentMismatch,
    body_offset,
    coded_body_offset,
    head_bytes,
    open_segment,
    payload_bytes,
    read_header,
    seal,
    verify,
)
from kvmanager.segments.head import reseal_header
from kvmanager.segments.keys import tenant_tag
from kvmanager.segments.server_secret import ServerSecret
from kvmanager.segments.spans import NodeKind, SegmentSpan

KEY, FINGERPRINT, PARENT = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
PROFILE = bytes(range(100, 116))
SECRET = ServerSecret(bytes(32))
TENANT = tenant_tag(SECRET, "acme")
SHAPE, DTYPE = (2, 2, 4, 1, 8), "bfloat16"
LAYERS = SHAPE[0]
PAYLOAD = bytes(index * 7 % 256 for index in range(payload_bytes(SHAPE, DTYPE)))
LAYER_BYTES = len(PAYLOAD) // LAYERS
BLOCKS = 2
HASHES = bytes(range(128, 160)) + KEY
HEAD = head_bytes(BLOCKS)
START = body_offset(SHAPE, DTYPE, BLOCKS)
CODED_START = coded_body_offset(LAYERS, BLOCKS)
HALF_BYTES = LAYER_BYTES // 2
EXPECTED = {"key": KEY, "fingerprint": FINGERPRINT, "shape": SHAPE, "dtype": DTYPE, "num_blocks": BLOCKS}
NAMED = {"key": KEY, "fingerprint": FINGERPRINT}
SPAN = SegmentSpan(KEY, PARENT, 6, 2, NodeKind.ANSWER, HASHES[:8] + KEY[:8], TENANT)
HEADER = SegmentHeader.raw(SPAN, HASHES, FINGERPRINT, SHAPE, DTYPE)
SECTIONS = [b"the first layer, coded", b""]
TOLERANT = replace(HEADER, fidelity="tolerant")


def sealed():
    buffer = bytearray(START) + PAYLOAD
    seal(buffer, HEADER)
    return buffer


def coded(sections, codec="cachegen", level=2, profile=PROFILE):
    body_bytes = CODED_START - HEAD + sum(map(len, sections))
    header = replace(TOLERANT, codec=codec, level=level, profile=profile, body_bytes=body_bytes)
    buffer = bytearray(CODED_START) + b"".join(sections)
    seal(buffer, header, [len(section) for section in sections])
    return header, bytes(buffer)


SEALED = bytes(sealed())
CODED_HEADER, CODED = coded(SECTIONS)


def refusal(buffer, **expected):
    with pytest.raises(SegmentMismatch) as refused:
        open_segment(buffer, **{**EXPECTED, **expected})
    if not {"shape", "dtype", "num_blocks"} & expected.keys():  # which `verify` does not compare
        with pytest.raises(SegmentMismatch) as unverified:
            verify(buffer, **{**NAMED, **expected})
        assert unverified.value.reason is refused.value.reason
    return refused.value.reason


def header_refusal(buffer):
    with pytest.raises(SegmentMismatch) as refused:
        read_header(buffer)
    return refused.value.reason


def flipped(bit, buffer=SEALED):
    changed = bytearray(buffer)
    changed[bit // 8] ^= 1 << bit % 8
    return changed


def forged(changes, buffer=SEALED):
    """A sealed segment with other bytes at some offsets; the checksums of head and table are right all the same."""
    changed = bytearray(buffer)
    head, start = HEAD, START if buffer == SEALED else CODED_START
    for offset, value in changes.items():
        changed[offset : offset + len(value)] = value
    if any(offset >= head for offset in changes):
        changed[176:192] = xxhash.xxh3_128_digest(changed[head:start])
    reseal_header(changed)
    return changed


def outcome(read, *arguments, **expected):
    try:
        return read(*arguments, **expected)
    except SegmentMismatch as refused:
        return refused


PAIRS = st.tuples(st.integers(1, 5), st.just(2), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9))
LATENTS = st.tuples(st.integers(1, 5), st.just(1), st.integers(1, 5), st.just(1), st.integers(1, 9))
SHAPES = PAIRS | LATENTS
