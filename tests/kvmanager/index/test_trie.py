import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.index.trie import PrefixTrie
from kvmanager.segments.keys import block_hashes
from kvmanager.segments.spans import NodeKind, SegmentSpan, split_segments

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), max_size=12)


def spans_of(tokens):
    return split_segments(block_hashes(tokens, 1, "tests"), 0, len(tokens), 2, len(tokens))


@given(prompts, st.integers(0, 6), st.integers(0, 2**32))
def test_the_coldest_leaves_are_forgotten_and_no_child_outlives_its_parent(sequences, max_ghosts, seed):
    rng = random.Random(seed)
    trie = PrefixTrie(max_ghosts)
    expected = {}
    for sequence in sequences:
        for span in spans_of(sequence):
            if span.key not in expected:
                score = rng.random()
                node = trie.insert(span, score)
                expected[span.key] = span, node
            elif rng.random() < 0.5:
                node = expected[span.key][1]
                node.score += 1
                trie.ghost_used(node)
        trie.forget_coldest_ghosts()
        while len(expected) > max_ghosts:
            parents = {span.parent for span, _ in expected.values()}
            del expected[min(expected.keys() - parents, key=lambda key: expected[key][1].score)]
        assert trie.nodes.keys() == expected.keys()
        assert trie.num_ghosts == len(expected)
        for span, node in expected.values():
            assert (node.parent.key if node.parent else None) == span.parent
            assert {child.key for child in node.children()} == {
                other.key for other, _ in expected.values() if other.parent == span.key
            }


def test_a_segment_whose_parent_is_unknown_is_not_known_either():
    trie = PrefixTrie(10)
    assert trie.insert(spans_of([0, 1, 0, 1])[1], 0.0) is None
    assert not trie.nodes


def test_a_ghost_takes_the_place_of_a_new_cut():
    trie = PrefixTrie(10)
    hashes = block_hashes([0, 1], 1, "tests")
    head, tail = (trie.insert(span, 0.0) for span in split_segments(hashes, 0, 2, 2, num_prompt_blocks=1))
    assert trie.reshape(tail, spans_of([0, 1])[0])
    assert (tail.start_block, tail.num_blocks, tail.parent, head.first_child) == (0, 2, None, None)


def test_a_segment_that_does_not_start_where_its_parent_ends_is_refused():
    trie = PrefixTrie(10)
    parent = trie.insert(spans_of([0, 1])[0], 0.0)
    with pytest.raises(ValueError, match="does not start where its parent ends"):
        trie.insert(SegmentSpan(b"k" * 32, parent.key, 3, 1, NodeKind.REQUEST, b"k" * 8), 0.0)
