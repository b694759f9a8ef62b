"""The names of a chain's blocks: from the segments' keys, devices, and what tiers say of segments."""

from __future__ import annotations

import pytest

from kvmanager.index.deltas import DeltaLog
from kvmanager.index.device_index import DeviceIndex
from kvmanager.index.nodes import Node
from kvmanager.index.trie import PrefixTrie
from kvmanager.segments.keys import BlockHash, SegmentKey, block_hashes
from kvmanager.segments.spans import NodeKind, SegmentSpan, join_marks, split_segments
from kvmanager.views.chains import HEARD_AT_ONCE, Chain

HASHES = block_hashes(list(range(12 * 4)), 4, "salt")


def path_of(*cuts: tuple[int, int]) -> list[Node]:
    """Nodes of blocks `[start, end)` of the sequence, each on the one before."""
    trie, path = PrefixTrie(100), list[Node]()
    above: SegmentKey | None = None
    for start, end in cuts:
        hashes = HASHES[start:end]
        span = SegmentSpan(SegmentKey(hashes[-1]), above, start, end - start, NodeKind.REQUEST, join_marks(hashes))
        node = trie.insert(span, 0.0)
        assert node is not None
        path.append(node)
        above = node.key
    return path


def hear_devices(chain: Chain, devices: DeviceIndex) -> None:
    for names in chain.on_devices(devices):
        chain.hear(names)


def test_a_large_device_is_heard_in_parts_while_its_blocks_change():
    path, devices = path_of((0, 4)), DeviceIndex(DeltaLog(10))
    devices.stored("large", [BlockHash(number.to_bytes(32, "little")) for number in range(3 * HEARD_AT_ONCE)])
    devices.stored("large", HASHES[:4])
    chain = Chain(path)
    heard = []
    for names in chain.on_devices(devices):
        heard.append(len(names))
        chain.hear(names)
        devices.stored("large", [BlockHash(bytes([len(heard)]) * 32)])
        devices.stored("another", HASHES[:4])
    assert max(heard) <= HEARD_AT_ONCE
    assert chain.names() == HASHES[:4]
    assert list(chain.on_devices(devices)) == []


def test_segments_of_one_block_name_themselves():
    chain = Chain(path_of((0, 1), (1, 2), (2, 3)))
    assert chain.unnamed() == []
    assert chain.names() == HASHES[:3]


def test_a_device_that_has_a_segment_of_it_names_the_rest_and_others_are_not_looked_at():
    path, devices = path_of((0, 4), (4, 8)), DeviceIndex(DeltaLog(10))
    chain = Chain(path)
    assert (chain.names(), chain.unnamed()) == (None, path)
    devices.stored("without its ends", HASHES[0:3])
    hear_devices(chain, devices)
    assert chain.unnamed() == path
    devices.stored("with the first", [*HASHES[:4], BlockHash(b"x" * 32)])
    hear_devices(chain, devices)
    assert (chain.names(), chain.unnamed()) == (None, path[1:])
    chain.hear(HASHES[4:8])
    assert chain.names() == HASHES[:8]


def test_what_begins_inside_its_parent_leaves_out_the_rest_of_that():
    other = block_hashes(list(range(8)) + [99] * 8, 4, "salt")
    trie = PrefixTrie(100)
    parent = trie.insert(split_segments(other, 0, 4, 4, 4)[0], 0.0)
    assert parent is not None
    span = SegmentSpan(SegmentKey(HASHES[3]), parent.key, 2, 2, NodeKind.REQUEST, join_marks(HASHES[2:4]))
    node = trie.insert(span, 0.0)
    assert node is not None
    chain = Chain([parent, node])
    chain.hear([*other, *HASHES])
    assert chain.names() == HASHES[:4]


@pytest.mark.parametrize("strangers", [0, 5_000])
def test_names_of_other_blocks_change_nothing(strangers: int):
    chain = Chain(path_of((0, 4)))
    chain.hear(BlockHash(number.to_bytes(32, "big")) for number in range(strangers))
    assert chain.names() is None
