"""Some blocks of a segment: those are verified and written, whatever happens to the others."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from deployments.transfer.segment_copy import SegmentCopier
from kernels.paged.layout import LayoutKind, PagedLayout
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import EXACT, MismatchReason, SegmentMismatch, read_header
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import split_segments

LAYERS, BLOCKS = 3, 6
LAYOUT = PagedLayout(LayoutKind.CPU_VEC, 32, 2, 128, torch.float32)
"""32 KiB of keys in a block: a checksum of its own."""
FINGERPRINT = b"f" * 32
HASHES = [BlockHash(random.Random(number).randbytes(32)) for number in range(BLOCKS)]
SPAN = split_segments(HASHES, 0, BLOCKS, BLOCKS, BLOCKS)[0]


def copier(seed: int) -> SegmentCopier:
    """A KV cache of noise."""
    draw = torch.Generator().manual_seed(seed)
    return SegmentCopier(
        [torch.rand(2 * BLOCKS, *LAYOUT.block_shape, generator=draw) for _ in range(LAYERS)], LAYOUT, FINGERPRINT
    )


SOURCE = copier(1)
SEALED = SOURCE.read(SPAN, b"".join(HASHES), range(BLOCKS), EXACT).tobytes()
HEADER = read_header(SEALED)


def load(used: int = 0) -> PlannedLoad:
    last = HASHES[used - 1] if used else b""
    return PlannedLoad(SPAN.key, 0, BLOCKS, "cpu", "node", len(SEALED), 0, used, last)


def damaged(layer: int, half: int, block: int) -> bytearray:
    """A flipped bit in one block's keys or values."""
    changed = bytearray(SEALED)
    run_bytes = (len(SEALED) - HEADER.body_offset) // (LAYERS * 2 * BLOCKS)
    changed[HEADER.body_offset + ((layer * 2 + half) * BLOCKS + block) * run_bytes + 4567] ^= 16
    return changed


def written(target: SegmentCopier, sealed: bytes | bytearray, used: int, skip: int) -> None:
    """Write blocks `[skip, used)` behind the first `BLOCKS` of the target, in reverse order."""
    ids = [2 * BLOCKS - 1 - number for number in range(used - skip)]
    target.write(memoryview(sealed), load(used), skip, ids)
    for got, expected in zip(target.layers, SOURCE.layers, strict=True):
        assert torch.equal(got[ids], expected[skip:used])


@pytest.mark.parametrize("used", range(1, BLOCKS + 1))
def test_the_blocks_that_are_wanted_arrive_and_no_others(used: int) -> None:
    for skip in range(used):
        target, before = copier(2), copier(2)
        written(target, SEALED, used, skip)
        untouched = [number for number in range(2 * BLOCKS) if number <= 2 * BLOCKS - 1 - (used - skip)]
        for got, expected in zip(target.layers, before.layers, strict=True):
            assert torch.equal(got[untouched], expected[untouched])


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_flipped_bit_matters_to_whoever_uses_its_block(layer: int, half: int) -> None:
    for block in range(BLOCKS):
        sealed = damaged(layer, half, block)
        for skip, used in ((0, BLOCKS), (0, 1), (0, 3), (2, 5), (3, 6), (5, 6)):
            target, before = copier(2), copier(2)
            if not skip <= block < used:
                written(target, sealed, used, skip)
                continue
            with pytest.raises(SegmentMismatch) as refused:
                written(target, sealed, used, skip)
            assert refused.value.reason is MismatchReason.CHECKSUM
            assert all(map(torch.equal, target.layers, before.layers)), "nothing was written"


def test_layer_by_layer_it_is_the_same() -> None:
    target = copier(2)
    opened = target.open(memoryview(damaged(1, 1, 4)), load(4))
    for layer in range(LAYERS):
        opened.write(range(layer, layer + 1), 1, [7, 8, 9])
    assert all(torch.equal(got[7:10], kv[1:4]) for got, kv in zip(target.layers, SOURCE.layers, strict=True))
    opened = target.open(memoryview(damaged(1, 1, 3)), load(4))
    opened.write(range(1), 1, [7, 8, 9])
    with pytest.raises(SegmentMismatch):
        opened.write(range(1, 2), 1, [7, 8, 9])


@pytest.mark.parametrize(
    "wrong",
    [
        load(3)._replace(last_hash=HASHES[3]),
        load(3)._replace(last_hash=b""),
        load(3)._replace(used_blocks=4),
        load()._replace(used_blocks=3),
        load()._replace(last_hash=HASHES[-1][:8] + bytes(24)),
    ],
)
def test_blocks_that_are_not_the_plans_are_refused(wrong: PlannedLoad) -> None:
    with pytest.raises(SegmentMismatch) as refused:
        copier(2).write(memoryview(SEALED), wrong, 0, [0, 1, 2])
    assert refused.value.reason is MismatchReason.BLOCK_HASH


def test_no_flipped_bit_of_the_head_or_the_table_is_overlooked_however_little_is_used() -> None:
    target = copier(2)
    draw = random.Random(4)
    for byte in {*range(0, HEADER.body_offset, 7), *(draw.randrange(HEADER.body_offset) for _ in range(50))}:
        changed = np.frombuffer(SEALED, np.uint8).copy()
        changed[byte] ^= 1 << draw.randrange(8)
        with pytest.raises(SegmentMismatch):
            target.write(changed.data, load(1), 0, [0])
