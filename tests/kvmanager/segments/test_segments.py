import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.segments.keys import block_hashes
from kvmanager.segments.sizes import check_segment_bytes
from kvmanager.segments.spans import NodeKind, SegmentSpan, join_marks, split_segments

HASHES = block_hashes(range(24), 1, "s")


@given(st.integers(0, 24), st.integers(0, 24), st.integers(1, 9), st.integers(0, 30))
def test_segments_tile_the_range_and_cross_no_cut(start, length, blocks_per_segment, num_prompt):
    end = min(24, start + length)
    spans = split_segments(HASHES, start, end, blocks_per_segment, num_prompt)
    position = start
    for span in spans:
        assert span.start_block == position
        assert span.key == HASHES[span.end_block - 1]
        assert span.parent == (HASHES[position - 1] if position else None)
        assert span.start_block // blocks_per_segment == (span.end_block - 1) // blocks_per_segment
        assert span.kind is (NodeKind.REQUEST if span.end_block <= num_prompt else NodeKind.ANSWER)
        assert not span.start_block < num_prompt < span.end_block
        position = span.end_block
    assert position == max(start, end)


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 9))
def test_two_prompts_share_the_whole_segments_of_their_common_prefix(left, right, blocks_per_segment):
    left_spans, right_spans = (
        split_segments(HASHES, 0, end, blocks_per_segment, num_prompt_blocks=end) for end in (left, right)
    )
    whole = min(left, right) // blocks_per_segment
    assert left_spans[:whole] == right_spans[:whole]


def test_a_range_outside_the_hashes_is_refused():
    with pytest.raises(ValueError, match="do not lie"):
        split_segments(HASHES, 0, 25, 4, 0)
    with pytest.raises(ValueError, match="do not lie"):
        split_segments(HASHES, 3, 2, 4, 0)


def test_segments_of_no_blocks_are_refused():
    with pytest.raises(ValueError, match="blocks_per_segment"):
        split_segments(HASHES, 0, 2, 0, 0)


@pytest.mark.parametrize(
    ("parent", "start", "blocks"), [(None, 1, 1), (HASHES[0], 0, 1), (None, 0, 0), (None, -1, 2), (HASHES[3], 3, 1)]
)
def test_a_span_that_contradicts_itself_is_refused(parent, start, blocks):
    with pytest.raises(ValueError, match="segment"):
        SegmentSpan(HASHES[3], parent, start, blocks, NodeKind.REQUEST, HASHES[3][:8])


@pytest.mark.parametrize("marks", [b"", HASHES[3][:8], 2 * HASHES[2][:8], 3 * HASHES[3][:8]])
def test_a_span_has_a_mark_for_each_block_and_its_keys_comes_last(marks):
    with pytest.raises(ValueError, match="a mark per block"):
        SegmentSpan(HASHES[3], HASHES[1], 2, 2, NodeKind.REQUEST, marks)


def test_marks_are_the_first_bytes_of_each_hash():
    assert join_marks([]) == b""
    assert join_marks(HASHES) == b"".join(block[:8] for block in HASHES)


@pytest.mark.parametrize("hashes", [[HASHES[0][:31]], [HASHES[0] + b"x", HASHES[1]], [b""]])
def test_hashes_of_another_length_have_no_marks(hashes):
    with pytest.raises(ValueError, match="32 bytes each"):
        join_marks(hashes)


def test_a_segment_too_large_to_store_is_refused_and_one_too_large_to_share_the_way_is_named():
    mib = 1 << 20
    assert check_segment_bytes(128 * mib, 256, 8) is None
    said = check_segment_bytes(210 * mib, 256, 8)  # Llama-2-13B in bfloat16
    assert said is not None
    assert "one at a time" in said
    assert "at most 156" in said
    with pytest.raises(ValueError, match=r"kv\.segment_tokens: 256 .* use at most 128"):
        check_segment_bytes(2048 * mib, 256, 8)
    with pytest.raises(ValueError, match=r"kv\.segment_tokens: .* 2048 blocks, .* use at most 16384"):
        check_segment_bytes(mib, 32768, 2048)
