import hashlib
import itertools
import struct

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from sealed_examples import (
    BLOCKS,
    CODED,
    CODED_HEADER,
    CODED_START,
    DTYPE,
    EXPECTED,
    FINGERPRINT,
    HALF_BYTES,
    HASHES,
    HEAD,
    HEADER,
    KEY,
    LAYER_BYTES,
    LAYERS,
    NAMED,
    PARENT,
    PAYLOAD,
    PROFILE,
    SEALED,
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
    MismatchReason,
    SegmentHeader,
    SegmentLayers,
    SegmentMismatch,
    SegmentSealer,
    body_offset,
    coded_body_offset,
    head_bytes,
    open_layers,
    open_segment,
    payload_bytes,
    read_header,
    read_layers,
    seal,
    sealed_bytes,
    stated_body_bytes,
    stated_head_bytes,
    verify,
)
from kvmanager.segments.sizes import blocks_per_checksum
from kvmanager.segments.spans import NodeKind, SegmentSpan


def test_segments_of_plain_attention_have_the_bytes_that_earlier_stores_have():
    """Of tokens, raw and coded; a change here needs another version of the format, and a reader of this one."""
    digests = [hashlib.sha256(stored).hexdigest()[:16] for stored in (bytes(sealed()), CODED)]
    assert digests == ["34d8304bbe61df95", "822d9331f114f4a7"]


@given(
    SHAPES,
    st.integers(1, 4),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.randoms(use_true_random=False),
)
def test_what_was_sealed_opens_to_the_same_bytes(shape, blocks, dtype, random):
    hashes = random.randbytes(32 * blocks)
    key, shape = hashes[-32:], (*shape[:2], shape[2] * blocks, *shape[3:])
    payload = random.randbytes(payload_bytes(shape, dtype))
    buffer = bytearray(body_offset(shape, dtype, blocks)) + payload
    marks = b"".join(hashes[at : at + 8] for at in range(0, len(hashes), 32))
    span = SegmentSpan(key, PARENT, 1, blocks, NodeKind.REQUEST, marks)
    header = SegmentHeader.raw(span, hashes, FINGERPRINT, shape, dtype)
    seal(buffer, header)
    assert read_header(buffer).span == span
    expected = {"key": key, "fingerprint": FINGERPRINT, "shape": shape, "dtype": dtype, "num_blocks": blocks}
    for readable in (buffer, bytes(buffer), memoryview(buffer)):
        assert open_segment(readable, **expected) == payload
        layers = open_layers(readable, **expected)
        assert b"".join(layers.layer(index) for index in range(shape[0])) == payload
        assert verify(readable, key=key, fingerprint=FINGERPRINT) == header
        assert [header.block_hash(number) for number in range(blocks)] == [
            hashes[at : at + 32] for at in range(0, len(hashes), 32)
        ]
    assert header.sealed_bytes == header.raw_sealed_bytes == sealed_bytes(shape, dtype, blocks) == len(buffer)
    assert stated_head_bytes(buffer[: head_bytes(blocks)]) == head_bytes(blocks)
    assert stated_body_bytes(bytes(buffer[:HEADER_BYTES])) == len(buffer) - head_bytes(blocks)


@settings(max_examples=60)
@given(
    st.integers(1, 3), st.sampled_from([1, 2]), st.integers(1, 6), st.sampled_from([64, 96, 128, 256, 300]), st.data()
)
def test_blocks_of_a_raw_layer_are_verified_without_reading_what_lies_apart(layers, halves, blocks, dim, data):
    """A flipped bit is seen by whoever asks for its block, or for one that shares its checksum, and by nobody else."""
    # One token a block: 8 to 37 KiB of keys, or of a latent.
    shape = (layers, 2, blocks, 64, dim) if halves == 2 else (layers, 1, blocks, 1, 64 * dim)
    hashes = b"".join(bytes([1 + number]) * 32 for number in range(blocks))
    marks = b"".join(hashes[at : at + 8] for at in range(0, len(hashes), 32))
    span = SegmentSpan(hashes[-32:], PARENT, 1, blocks, NodeKind.REQUEST, marks)
    header = SegmentHeader.raw(span, hashes, FINGERPRINT, shape, DTYPE)
    buffer = bytearray(header.sealed_bytes)
    seal(buffer, header)
    start, run_bytes = header.body_offset, 64 * dim * 2
    byte = data.draw(st.integers(start, len(buffer) - 1))
    buffer[byte] ^= 1 << data.draw(st.integers(0, 7))
    first = data.draw(st.integers(0, blocks - 1))
    end = data.draw(st.integers(first, blocks))
    expected = {**EXPECTED, "key": span.key, "shape": shape, "num_blocks": blocks}
    found = open_layers(buffer, **expected)
    damaged, run = divmod((byte - start) // run_bytes, halves * blocks)
    together = blocks_per_checksum(shape, DTYPE, blocks)
    assert together == min(blocks, -(-(32 << 10) // run_bytes))
    asked = {block // together for block in range(first, end)}
    for index in range(layers):
        view = outcome(found.blocks, index, first, end)
        if index == damaged and run % blocks // together in asked:
            assert view.reason is MismatchReason.CHECKSUM
        else:
            assert len(view) == halves * blocks * run_bytes


def test_a_layers_checksum_is_that_of_its_checksums_in_the_table():
    halves = PAYLOAD[:HALF_BYTES], PAYLOAD[HALF_BYTES:LAYER_BYTES]
    digests = b"".join(map(xxhash.xxh3_128_digest, halves))
    assert SEALED[HEAD : HEAD + len(digests)] == digests
    layers = open_layers(SEALED, **EXPECTED)
    sealer = SegmentSealer(sealed(), HEADER)
    assert layers.checksum(0) == xxhash.xxh3_128_digest(digests) == sealer.add()


@given(
    st.lists(st.binary(max_size=40), min_size=1, max_size=6),
    st.sampled_from(["lossless", "cachegen"]),
    st.integers(0, 3),
)
def test_coded_sections_of_any_lengths_come_back_one_by_one(sections, codec, level):
    shape = (len(sections), 2, 4, 1, 8)
    lossy = codec in LOSSY_CODECS
    start = coded_body_offset(len(sections), BLOCKS)
    header = SegmentHeader(
        HASHES, FINGERPRINT, shape, DTYPE, start - HEAD + sum(map(len, sections)), PARENT, 6,
        NodeKind.ANSWER, TENANT, codec, level if lossy else 0, "tolerant", PROFILE if lossy else b"",
    )  # fmt: skip
    buffer = bytearray(start) + b"".join(sections)
    seal(buffer, header, [len(section) for section in sections])
    layers = read_layers(bytes(buffer), **NAMED)
    assert layers.header == header == verify(buffer, **NAMED)
    assert [bytes(layers.layer(index)) for index in range(len(layers))] == sections
    assert header.decoded == SegmentHeader.raw(SPAN, HASHES, FINGERPRINT, shape, DTYPE, "tolerant")
    assert header.raw_sealed_bytes == sealed_bytes(shape, DTYPE, BLOCKS)


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
    for layers, blocks in itertools.product(range(1, 100), range(1, 8)):
        assert coded_body_offset(layers, blocks) % 64 == 0
        assert body_offset((layers, 2, 16 * blocks, 8, 128), DTYPE, blocks) % 64 == 0


def test_every_flipped_bit_of_the_table_is_refused_before_any_layer_is_read():
    for buffer, start, read in ((SEALED, START, open_layers), (CODED, CODED_START, read_layers)):
        for bit in range(HEAD * 8, start * 8):
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
    if size < HEAD:
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
        ({"num_blocks": 1}, MismatchReason.SHAPE),
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


def test_the_offsets_are_those_of_the_table():
    # Redis outlives releases: a change of the layout needs a new version.
    fields = struct.unpack_from("<8sHHHH5I2IHBBQ32s32s32s8s16s16s48s16s", CODED)
    assert fields[:5] == (b"CROSSKV\0", 6, 2, 4, 2)
    assert fields[5:16] == (*SHAPE, 6, 2, 2, 1, 0, len(CODED) - HEAD)
    assert fields[16:21] == (KEY, PARENT, FINGERPRINT, bytes.fromhex(TENANT), PROFILE)
    assert CODED[256:320] == HASHES
    own = xxhash.xxh3_128_digest(CODED[:240] + HASHES)
    assert fields[21:] == (xxhash.xxh3_128_digest(CODED[320:384]), bytes(48), own)
    entries = [(len(section), xxhash.xxh3_128_digest(section)) for section in SECTIONS]
    assert [*struct.iter_unpack("<Q16s", CODED[320:368])] == entries
    assert CODED[368:384] == bytes(16)
    assert CODED[384:] == b"".join(SECTIONS)
    assert struct.unpack_from("<QHHHH5I2IHH", SEALED)[3] == 0
    assert SEALED[256:320] == HASHES
    halves = [PAYLOAD[at : at + HALF_BYTES] for at in range(0, len(PAYLOAD), HALF_BYTES)]
    assert SEALED[320:384] == b"".join(map(xxhash.xxh3_128_digest, halves))
    assert SEALED[384:] == PAYLOAD


@given(st.binary(max_size=600))
def test_random_bytes_are_refused_and_nothing_else_happens(noise):
    assert header_refusal(noise) in (MismatchReason.TRUNCATED, MismatchReason.MAGIC)
    assert refusal(noise) is header_refusal(noise)


@given(
    st.sampled_from([SEALED, CODED]),
    st.dictionaries(st.integers(0, CODED_START - 1), st.binary(min_size=1, max_size=8), max_size=4),
)
def test_a_forged_head_or_table_never_raises_anything_but_a_mismatch(buffer, changes):
    buffer = forged({offset: value[: CODED_START - offset] for offset, value in changes.items()}, buffer)
    for found in (outcome(read_header, buffer), outcome(read_header, buffer[:HEAD])):
        assert isinstance(found, SegmentHeader | SegmentMismatch)
    assert isinstance(outcome(verify, buffer, **NAMED), SegmentHeader | SegmentMismatch)
    assert isinstance(outcome(open_segment, buffer, **EXPECTED), memoryview | SegmentMismatch)
    assert isinstance(outcome(open_layers, buffer, **EXPECTED), SegmentLayers | SegmentMismatch)


@pytest.mark.parametrize("lengths", [(22, 1), (21, 0), (23, 0), (2**64 - 1, 0), (2**63, 2**63)])
def test_a_table_that_is_not_the_bodys_is_refused_although_its_checksum_is_right(lengths):
    changes = {HEAD + 24 * index: struct.pack("<Q", length) for index, length in enumerate(lengths)}
    assert outcome(read_layers, forged(changes, CODED), **NAMED).reason is MismatchReason.LENGTH


@pytest.mark.parametrize("layers", [3, 1000, 2**32 - 1])
def test_nothing_is_allocated_for_layers_that_a_header_merely_states(layers):
    body_bytes = body_offset((layers, *SHAPE[1:]), DTYPE, BLOCKS) - HEAD + layers * LAYER_BYTES
    changes = {16: struct.pack("<I", layers), 48: struct.pack("<Q", body_bytes)}
    assert outcome(read_layers, forged(changes), **NAMED).reason is MismatchReason.TRUNCATED


def test_another_segments_header_on_these_layers_is_refused():
    other = bytearray(len(SEALED))
    seal(other, HEADER)
    assert refusal(other[:HEAD] + SEALED[HEAD:]) is MismatchReason.CHECKSUM
    assert refusal(other[:START] + PAYLOAD) is MismatchReason.CHECKSUM


def test_two_layers_that_changed_places_are_refused():
    swapped = SEALED[:START] + PAYLOAD[LAYER_BYTES:] + PAYLOAD[:LAYER_BYTES]
    assert refusal(swapped) is MismatchReason.CHECKSUM


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
