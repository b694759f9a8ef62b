"""The Triton version does what the reference does: under Triton's interpreter everywhere, on a GPU where there is one.

Triton decides when it is imported whether it interprets, and other test modules import it, so the interpreted tests run
in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.paged import gather_scatter as paged
from kernels.paged.layout import LayoutKind, PagedLayout
from kernels.paged.reference import gather_reference, scatter_reference
from load_tests.harness.patience import patience

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ROOT = Path(__file__).parents[2]
INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}

runs_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU; interpreted in a process of its own"
)


def bits(tensor):
    """As integers, on the CPU: comparing floats would call a NaN different from itself."""
    return tensor.cpu().contiguous().view(INTEGERS[tensor.dtype])


def random_tensor(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2**15), 2**15, shape, dtype=torch.int64, generator=generator)
    return (integers * 65537).to(INTEGERS[dtype]).view(dtype).to(DEVICE)


@st.composite
def paged_caches(draw):
    """(layout, layers in any memory order, block ids in any order): head_dim and block_size need be no power of two."""
    dtype = draw(st.sampled_from(list(INTEGERS)))
    layout = PagedLayout(
        LayoutKind.CUDA_FLASH,
        block_size=draw(st.integers(1, 40)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 80)),
        dtype=dtype,
    )
    num_blocks = draw(st.integers(1, 5))
    order = draw(st.permutations([0, 1, 2, 3]))  # of the dimensions in memory, outermost first
    sizes = (num_blocks, *layout.block_shape)
    inverse = [order.index(dimension) for dimension in range(4)]
    layers = [
        random_tensor([sizes[dimension] for dimension in order], dtype, seed).permute(inverse)
        for seed in range(draw(st.integers(1, 3)))
    ]
    block_ids = draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, unique=True))
    return layout, layers, block_ids


@runs_triton
@settings(deadline=None, derandomize=True, max_examples=20)  # no conftest.py in its own process
@given(paged_caches())
def test_triton_gather_equals_reference_in_any_memory_order(cache):
    from kernels.paged.triton import gather_triton

    layout, layers, block_ids = cache
    before = [layer.clone() for layer in layers]
    shape = layout.segment_shape(len(layers), len(block_ids))
    out, expected = random_tensor(shape, layout.dtype, 98), random_tensor(shape, layout.dtype, 99)
    gather_triton(layers, block_ids, layout, out)
    gather_reference(layers, block_ids, layout, expected)
    assert torch.equal(bits(out), bits(expected))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(layers, before, strict=True))


@runs_triton
@settings(deadline=None, derandomize=True, max_examples=20)  # no conftest.py in its own process
@given(paged_caches())
def test_triton_scatter_equals_reference_and_touches_no_other_block(cache):
    from kernels.paged.triton import scatter_triton

    layout, layers, block_ids = cache
    expected = [layer.clone() for layer in layers]
    segment = random_tensor(layout.segment_shape(len(layers), len(block_ids)), layout.dtype, 99)
    scatter_triton(layers, block_ids, layout, segment)
    scatter_reference(expected, block_ids, layout, segment)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(layers, expected, strict=True))


@runs_triton
@pytest.mark.parametrize("token_major", [True, False], ids=["NHD", "HND"])
def test_triton_on_both_of_vllms_memory_orders_and_a_layer_alone(token_major):
    from kernels.paged.triton import gather_triton, scatter_triton

    layout = PagedLayout(LayoutKind.CUDA_FLASH, 16, 2, 64, torch.bfloat16)
    layers = [random_tensor((7, 16, 2, 128), layout.dtype, seed).transpose(1, 2) for seed in range(3)]
    if not token_major:
        layers = [layer.contiguous() for layer in layers]
    segment = torch.zeros(layout.segment_shape(3, 2), dtype=layout.dtype, device=DEVICE)
    for layer in range(3):
        gather_triton(layers[layer : layer + 1], [5, 2], layout, segment[layer : layer + 1])
    expected = torch.empty_like(segment)
    gather_reference(layers, [5, 2], layout, expected)
    assert torch.equal(bits(segment), bits(expected))
    restored = [torch.zeros_like(layer) for layer in layers]
    scatter_triton(restored, [5, 2], layout, segment)
    assert all(torch.equal(bits(a[[5, 2]]), bits(b[[5, 2]])) for a, b in zip(restored, layers, strict=True))
    assert not any(layer[[0, 1, 3, 4, 6]].any() for layer in restored)


@pytest.mark.skipif(INTERPRETED, reason="this is the process of its own")
def test_triton_version_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", str(Path(__file__))]
    result = subprocess.run(
        [*command, "-k", "test_triton_ and not under_the_interpreter"],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        timeout=patience(280), check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 passed" in result.stdout
    assert "skipped" not in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="here Triton has a GPU")
def test_without_a_gpu_for_triton_indexing_is_taken_and_said_once(caplog):
    paged._cuda_version.cache_clear()
    try:
        versions = {paged._cuda_version(torch.device("cuda", 0)) for _ in range(3)}
    finally:
        paged._cuda_version.cache_clear()
    assert versions == {(paged.gather_index, paged.scatter_index)}
    assert len([record for record in caplog.records if record.name.startswith("kernels")]) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_with_a_gpu_triton_is_taken_and_a_segment_on_the_cpu_is_served_too():
    from kernels.paged.triton import gather_triton, scatter_triton

    layout = PagedLayout(LayoutKind.CUDA_FLASH, 16, 2, 64, torch.bfloat16)
    paged.warm_up(layout)
    assert paged._cuda_version(torch.device("cuda", 0)) == (gather_triton, scatter_triton)
    layers = [random_tensor((5, *layout.block_shape), layout.dtype, 3)]
    segment, expected = (torch.zeros(layout.segment_shape(1, 2), dtype=layout.dtype) for _ in range(2))
    paged.gather(layers, [4, 1], layout, segment)
    gather_reference([layers[0].cpu()], [4, 1], layout, expected)
    assert torch.equal(bits(segment), bits(expected))
    restored = [torch.zeros_like(layers[0])]
    paged.scatter(restored, [4, 1], layout, segment)
    assert torch.equal(bits(restored[0][[4, 1]]), bits(layers[0][[4, 1]]))
