"""The fast versions do what the reference does, on every layout, and refuse what would leave the tensors."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged.gather_scatter import gather, scatter, warm_up
from kernels.paged.layout import LayoutKind, PagedLayout
from kernels.paged.reference import gather_reference, scatter_reference

ANY_BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.uint8: torch.uint8,
}
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


def bits(tensor):
    """The tensor's elements as integers: comparing floats would call a NaN different from itself."""
    return tensor.contiguous().view(ANY_BITS[tensor.dtype])


def random_tensor(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2**15), 2**15, shape, dtype=torch.int64, generator=generator)
    return (integers * 65537).to(ANY_BITS[dtype]).view(dtype)


@st.composite
def paged_caches(draw):
    """(layout, layers with random bits, block ids in any order)."""
    kind = draw(st.sampled_from(LayoutKind))
    tile = 32 if kind is LayoutKind.CPU_AMX else 16
    one = {LayoutKind.CPU_AMX: torch.bfloat16, LayoutKind.OPAQUE: torch.uint8}.get(kind)
    dtype = one or draw(st.sampled_from(FLOATS))
    layout = PagedLayout(
        kind,
        block_size=tile * draw(st.integers(1, 4)),
        num_kv_heads=1 if kind is LayoutKind.LATENT else draw(st.integers(1, 3)),
        head_dim=tile * draw(st.integers(1, 5)),
        dtype=dtype,
    )
    num_blocks = draw(st.integers(1, 6))
    layers = [random_tensor((num_blocks, *layout.block_shape), dtype, seed) for seed in range(draw(st.integers(1, 3)))]
    block_ids = draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, unique=True))
    return layout, layers, block_ids


def segment_for(layout, layers, block_ids, seed=99):
    return random_tensor(layout.segment_shape(len(layers), len(block_ids)), layout.dtype, seed)


@settings(max_examples=150)
@given(paged_caches())
def test_gather_equals_reference(cache):
    layout, layers, block_ids = cache
    before = [layer.clone() for layer in layers]
    out, expected = segment_for(layout, layers, block_ids, 1), segment_for(layout, layers, block_ids, 2)
    gather(layers, block_ids, layout, out)
    gather_reference(layers, block_ids, layout, expected)
    assert torch.equal(bits(out), bits(expected))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(layers, before, strict=True))


@settings(max_examples=150)
@given(paged_caches())
def test_scatter_equals_reference_and_touches_no_other_block(cache):
    layout, layers, block_ids = cache
    expected = [layer.clone() for layer in layers]
    others = [block for block in range(len(layers[0])) if block not in block_ids]
    before = [layer[others].clone() for layer in layers]
    segment = segment_for(layout, layers, block_ids)
    scatter(layers, block_ids, layout, segment)
    scatter_reference(expected, block_ids, layout, segment)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(layers, expected, strict=True))
    assert all(torch.equal(bits(a[others]), bits(b)) for a, b in zip(layers, before, strict=True))


@settings(max_examples=75)
@given(paged_caches(), st.randoms(use_true_random=False))
def test_gather_returns_what_scatter_wrote_elsewhere(cache, random):
    layout, layers, block_ids = cache
    segment = segment_for(layout, layers, block_ids)
    targets = random.sample(range(len(layers[0])), len(block_ids))
    scatter(layers, targets, layout, segment)
    out = torch.zeros_like(segment)
    gather(layers, targets, layout, out)
    assert torch.equal(bits(out), bits(segment))


@settings(max_examples=60)
@given(paged_caches(), st.data())
def test_a_group_of_layers_alone_is_moved_with_a_slice_of_layers_and_of_the_segment(cache, data):
    layout, layers, block_ids = cache
    first = data.draw(st.integers(0, len(layers) - 1))
    group = slice(first, data.draw(st.integers(first + 1, len(layers))))
    segment = segment_for(layout, layers, block_ids)
    expected = segment.clone()
    gather_reference(layers[group], block_ids, layout, expected[group])
    gather(layers[group], block_ids, layout, segment[group])
    assert torch.equal(bits(segment), bits(expected))  # the other layers of the segment are as they were

    targets = [torch.zeros_like(layer) for layer in layers]
    wanted = [torch.zeros_like(layer) for layer in layers]
    scatter_reference(wanted[group], block_ids, layout, segment[group])
    scatter(targets[group], block_ids, layout, segment[group])
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(targets, wanted, strict=True))


@pytest.mark.parametrize("offset", [0, 64, 2, 34], ids=["line", "next-line", "element", "odd"])
@pytest.mark.parametrize("kind", list(LayoutKind))
def test_segment_may_lie_anywhere_in_a_byte_buffer(kind, offset):
    heads = 1 if kind is LayoutKind.LATENT else 2
    layout = PagedLayout(kind, 32, heads, 64, torch.uint8 if kind is LayoutKind.OPAQUE else torch.bfloat16)
    layers = [random_tensor((3, *layout.block_shape), layout.dtype, 5)]
    shape = layout.segment_shape(1, 2)
    buffer = bytearray(b"\xa5" * (offset + layout.dtype.itemsize * torch.Size(shape).numel() + 64))
    segment = torch.frombuffer(buffer, dtype=layout.dtype, offset=offset, count=torch.Size(shape).numel()).view(shape)
    gather(layers, [2, 0], layout, segment)
    expected = torch.empty(shape, dtype=layout.dtype)
    gather_reference(layers, [2, 0], layout, expected)
    assert torch.equal(bits(segment), bits(expected))
    assert buffer[:offset] == b"\xa5" * offset
    assert buffer[-64:] == b"\xa5" * 64
    restored = [torch.zeros_like(layers[0])]
    scatter(restored, [2, 0], layout, segment)
    assert torch.equal(bits(restored[0][[2, 0]]), bits(layers[0][[2, 0]]))


@pytest.mark.parametrize("token_major", [True, False], ids=["NHD", "HND"])
def test_cuda_layout_in_both_of_vllms_memory_orders(token_major):
    """Written the way vLLM's FlashAttention splits its cache, read back as a segment."""
    layout = PagedLayout(LayoutKind.CUDA_FLASH, 16, 2, 8, torch.float16)
    cache = torch.zeros(5, 16, 2, 16, dtype=torch.float16).transpose(1, 2)
    if not token_major:
        cache = cache.contiguous()
    key, value = random_tensor((2, 32, 2, 8), torch.float16, 7)
    key_cache, value_cache = cache.transpose(1, 2).split(layout.head_dim, dim=-1)
    for position, block in enumerate([3, 1]):
        key_cache[block] = key[position * 16 : position * 16 + 16]
        value_cache[block] = value[position * 16 : position * 16 + 16]
    segment = torch.empty(layout.segment_shape(1, 2), dtype=torch.float16)
    gather([cache], [3, 1], layout, segment)
    assert torch.equal(bits(segment[0, 0]), bits(key))
    assert torch.equal(bits(segment[0, 1]), bits(value))
    restored = torch.zeros_like(cache)
    scatter([restored], [3, 1], layout, segment)
    assert restored.stride() == cache.stride()
    assert torch.equal(bits(restored), bits(cache))


def test_compiled_copy_does_not_hold_the_gil():
    layout = PagedLayout(LayoutKind.CPU_VEC, 128, 8, 64, torch.float32)
    warm_up(layout)
    layers = [torch.zeros(4, *layout.block_shape)] * 24
    out = torch.zeros(layout.segment_shape(24, 4))

    def wakes_during_one_gather():
        copying = threading.Thread(target=gather, args=(layers, [3, 1, 0, 2], layout, out))
        copying.start()
        wakes = 0
        while copying.is_alive():
            time.sleep(0.0002)
            wakes += 1
        return wakes

    # A gather takes about 10 ms. Holding the GIL, it would let this thread wake once or twice in every attempt.
    # On a machine that is busy with other things an attempt may be in vain.
    assert any(wakes_during_one_gather() >= 8 for _ in range(50))


LAYOUT = PagedLayout(LayoutKind.CPU_VEC, 32, 2, 64, torch.bfloat16)


def layer(**changed):
    arguments = {"size": (4, 2, 32, 128), "dtype": torch.bfloat16, **changed}
    return torch.zeros(**arguments)


def segment(shape=(1, 2, 64, 2, 64), dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("move", [gather, scatter])
@pytest.mark.parametrize(
    ("layers", "block_ids", "buffer", "says"),
    [
        ([layer()], [0, 4], segment(), "0..4 are not all among the 4 blocks"),
        ([layer()], [-1, 0], segment(), "-1..0 are not all"),
        ([layer(), layer(size=(3, 2, 32, 128))], [0, 3], segment((2, 2, 64, 2, 64)), "blocks of layer 1"),
        ([layer()], [0], segment(), "segment must be contiguous"),
        ([layer()], [0, 1], segment(dtype=torch.float16), "segment must be contiguous"),
        ([layer()], [0, 1], segment((1, 2, 2, 64, 64)).transpose(2, 3), "segment must be contiguous"),
        ([layer(dtype=torch.float16)], [0, 1], segment(), "layer 0 must be"),
        ([layer(size=(4, 1, 32, 128))], [0, 1], segment(), "layer 0 must be"),
        ([layer(size=(8, 2, 32, 128))[::2]], [0, 1], segment(), "contiguous CPU tensors"),
        ([], [0, 1], segment(), "at least one layer"),
        ([layer()], [], segment(), "one block"),
    ],
)
def test_misfits_are_refused(move, layers, block_ids, buffer, says):
    with pytest.raises(ValueError, match=says):
        move(layers, block_ids, LAYOUT, buffer)


def test_scatter_refuses_one_block_for_two_positions():
    with pytest.raises(ValueError, match="named twice"):
        scatter([layer()], [1, 1], LAYOUT, segment())
