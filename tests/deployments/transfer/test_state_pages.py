"""States of a layer are moved as pages of bytes, and what does not lie in pages of one size is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deployments.transfer.segment_copy import NULL_BLOCK, state_copier, state_pages
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import SegmentMismatch
from kvmanager.segments.keys import SegmentKey, state_name
from kvmanager.segments.spans import split_segments
from load_tests.harness.memory_port import HERE

BLOCKS, PAGE = 5, 256


def layer(fill: int) -> list[torch.Tensor]:
    """A layer's convolution in bfloat16 and recurrence in float32, in pages of 256 bytes of which 64 are unused."""
    raw = torch.full((BLOCKS * PAGE,), fill, dtype=torch.uint8)
    convolution = raw.view(torch.bfloat16).as_strided((BLOCKS, 2, 16), (PAGE // 2, 16, 1))
    recurrence = raw.view(torch.float32).as_strided((BLOCKS, 4, 8), (PAGE // 4, 8, 1), 16)
    return [convolution, recurrence]


def names() -> list[Any]:
    hashes: list[Any] = [bytes([number]) * 32 for number in range(1, 4)]
    return [*hashes, state_name(hashes[-1])]


def test_a_page_is_all_that_a_block_has_of_a_layer() -> None:
    convolution, recurrence = layer(0)
    convolution[3], recurrence[3] = 1.0, 2.0
    pages = state_pages([recurrence, convolution])
    assert (pages.shape, pages.is_contiguous()) == ((BLOCKS, 1, 1, PAGE), True)
    assert pages[3].count_nonzero() > 0
    assert pages[[0, 1, 2, 4]].count_nonzero() == 0
    pages[1] = pages[3]
    assert bool((recurrence[1] == 2.0).all() and (convolution[1] == 1.0).all())


def test_what_is_stored_at_a_boundary_comes_back_into_other_blocks_of_each_group() -> None:
    one, other = layer(3), layer(4)
    runs = [(range(1), 0), (range(1, 2), 2)]
    copier = state_copier([one, other], runs, bytes(32))
    (span,) = split_segments(names(), 3, 4, 8, 4)
    one[1][2], other[1][4] = 7.0, 8.0
    sealed = copier.read(span, span.key, (2,), "exact", [[2], [NULL_BLOCK], [4]])
    load = PlannedLoad(span.key, 3, 1, *HERE, len(sealed), len(sealed))
    copier.write(memoryview(sealed), load, 0, (), [[1], [NULL_BLOCK], [3]])
    assert bool((one[1][1] == 7.0).all() and (other[1][3] == 8.0).all())
    sealed[-1] ^= 1
    with pytest.raises(SegmentMismatch):
        copier.write(memoryview(sealed), load, 0, (), [[1], [NULL_BLOCK], [3]])
    with pytest.raises(SegmentMismatch):
        copier.write(memoryview(sealed), load._replace(key=SegmentKey(names()[0])), 0, (), [[1], [NULL_BLOCK], [3]])


def test_states_that_do_not_lie_in_pages_of_one_size_are_refused() -> None:
    convolution, recurrence = layer(0)
    with pytest.raises(ValueError, match="pages of one size"):
        state_pages([convolution, layer(0)[1]])
    with pytest.raises(ValueError, match="beyond their page"):
        state_pages([recurrence.as_strided((BLOCKS - 1, 4, 48), recurrence.stride(), 0)])
    small = torch.zeros(BLOCKS, 16)
    with pytest.raises(ValueError, match="several sizes"):
        state_copier([[convolution, recurrence], small], [(range(2), 0)], bytes(32))


@pytest.mark.parametrize(("layers", "fits"), [(15, True), (16, False)])
def test_states_that_are_more_than_a_segment_can_hold_are_refused(layers: int, fits: bool) -> None:
    page = torch.empty(1, 64 << 20, dtype=torch.uint8)  # of which nothing is written or read
    if fits:
        assert state_copier([page] * layers, [(range(layers), 0)], bytes(32)).sealed_bytes(1) < 1 << 30
        return
    with pytest.raises(ValueError, match="a segment of 1024 MiB, more than the 1024 MiB that can be stored"):
        state_copier([page] * layers, [(range(layers), 0)], bytes(32))
