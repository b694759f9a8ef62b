import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.index.trie import MOST_TWINS, PrefixTrie
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
            below = [other.key for other, _ in expected.values() if other.parent == span.key]
            assert sorted(child.key for child in node.children()) == sorted(below)
            assert node.num_children == len(below)
        roots = [node for _, node in expected.values() if node.parent is None]
        assert trie.num_roots.get("", 0) == len(roots)
        assert list(trie.roots) == ([""] if roots else [])


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


def child(parent, start, number=0):
    return SegmentSpan(bytes([number]) * 32, parent.key, start, 1, NodeKind.REQUEST, bytes([number]) * 8)


@pytest.mark.parametrize(("start", "fits"), [(1, True), (2, True), (3, False)])
def test_a_segment_follows_on_the_one_that_holds_the_block_before_it(start, fits):
    trie = PrefixTrie(10)
    parent = trie.insert(spans_of([0, 1])[0], 0.0)
    assert (trie.insert(child(parent, start), 0.0) is not None) == fits


def test_a_ghost_does_not_move_behind_what_leaves_it_inside():
    trie = PrefixTrie(10)
    hashes = block_hashes([0, 1, 2, 3], 1, "tests")
    short, whole = split_segments(hashes, 0, 2, 4, 4)[0], split_segments(hashes, 0, 4, 4, 4)[0]
    head, node = trie.insert(short, 0.0), trie.insert(whole, 0.0)
    leaves = trie.insert(child(node, 2), 0.0)
    rest = replace(whole, parent=head.key, start_block=2, num_blocks=2, marks=whole.marks[16:])
    assert not trie.reshape(node, rest), "its child would begin before it"
    assert (node.start_block, node.parent, leaves.parent) == (0, None, node)
    assert list(trie.runs.twins(whole.marks[:8])) == [node, head]
    trie.reshape(leaves, replace(child(head, 2), start_block=2))
    assert trie.reshape(node, rest)
    assert (node.start_block, node.parent, leaves.parent) == (2, head, head)
    assert list(trie.runs.twins(whole.marks[:8])) == [head]


def test_so_many_twins_are_known_and_a_new_one_takes_the_place_of_the_coldest_that_may_go():
    trie = PrefixTrie(100)
    spans = [
        SegmentSpan(bytes([number + 1]) * 32, None, 0, 2, NodeKind.REQUEST, bytes(8) + bytes([number + 1]) * 8)
        for number in range(MOST_TWINS + 2)
    ]
    nodes = [trie.insert(span, float(10 - number)) for number, span in enumerate(spans[:MOST_TWINS])]
    trie.pin(nodes[-1])
    assert trie.insert(spans[-2], 5.0) is not None
    assert spans[MOST_TWINS - 2].key not in trie.nodes, "the coldest without a pin"
    assert trie.num_ghosts == MOST_TWINS == len(list(trie.runs.twins(bytes(8))))
    for node in trie.nodes.values():
        trie.pin(node)
    assert trie.insert(spans[-1], 99.0) is None
    assert trie.twins_refused == 1


class Stop:
    def __init__(self, node):
        self.next_child = node


def test_a_cursor_that_goes_on_leaves_the_others_where_they_stopped():
    trie = PrefixTrie(100)
    root = trie.insert(spans_of([0, 1])[0], 0.0)
    first, second, third = (trie.insert(child(root, 2, number), 0.0) for number in (3, 2, 1))
    stays, goes, at_the_end = Stop(second), Stop(second), Stop(None)
    for cursor in (stays, goes, at_the_end):
        trie.stop(cursor)
    for cursor in (goes, at_the_end):
        trie.go_on(cursor)
    trie.bring_forward(first)
    assert list(root.children()) == [third, second, first], "siblings keep their order while one is on its way"
    trie._forget(second)
    assert (stays.next_child, goes.next_child) == (first, second)
    trie.go_on(stays)
    trie.bring_forward(first)
    assert list(root.children()) == [first, third]
