"""What vLLM's own cache writer put into blocks is what gather reads, and what scatter writes, bit for bit."""

import pytest
import torch

from kernels.paged.gather_scatter import gather, scatter
from kernels.paged.layout import LayoutKind, PagedLayout, cpu_layout_for

pytest.importorskip("vllm")
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("needs vLLM's CPU backend", allow_module_level=True)
current_platform.import_kernels()

NUM_BLOCKS = 7
BLOCK_IDS = [5, 1, 6, 2]


def written_by_vllm(layout, isa, key, value):
    """A cache layer in which vLLM wrote ``key`` and ``value``, ``[token, kv_head, head_dim]``, into BLOCK_IDS."""
    cache = torch.zeros(NUM_BLOCKS, *layout.block_shape, dtype=layout.dtype)
    # The split into K and V regions is that of vLLM's CPUAttentionBackendImpl.do_kv_cache_update.
    regions = cache.view(NUM_BLOCKS, layout.num_kv_heads, 2 * layout.block_size, layout.head_dim)
    key_cache, value_cache = regions.chunk(2, dim=2)
    slots = torch.cat([torch.arange(layout.block_size) + block * layout.block_size for block in BLOCK_IDS])
    torch.ops._C.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa, 1.0, 1.0, "auto")
    return cache


@pytest.mark.parametrize(
    ("isa", "dtype", "head_dim"),
    [
        ("vec", torch.bfloat16, 64),
        ("vec", torch.float16, 128),
        ("vec", torch.float32, 96),
        ("vec16", torch.bfloat16, 80),
        ("vec16", torch.float16, 112),
        ("vec16", torch.float32, 80),
        ("amx", torch.bfloat16, 32),
        ("amx", torch.bfloat16, 64),
        ("amx", torch.bfloat16, 128),
    ],
)
@pytest.mark.parametrize(("block_size", "num_kv_heads"), [(32, 2), (64, 1), (128, 3)])
def test_blocks_written_by_vllm(isa, dtype, head_dim, block_size, num_kv_heads):
    layout = cpu_layout_for(isa, block_size, num_kv_heads, head_dim, dtype)
    generator = torch.Generator().manual_seed(head_dim)
    tokens = len(BLOCK_IDS) * block_size
    segment = torch.randn(2, 2, tokens, num_kv_heads, head_dim, generator=generator).to(dtype)
    try:
        layers = [written_by_vllm(layout, isa, key, value) for key, value in segment]
    except RuntimeError as error:
        if isa == "amx" and "Unsupported CPU attention configuration" in str(error):
            pytest.skip("this build of vLLM has no amx attention, so it cannot write that layout here")
        raise

    gathered = torch.empty_like(segment)
    gather(layers, BLOCK_IDS, layout, gathered)
    assert torch.equal(gathered, segment)

    scattered = [torch.zeros_like(layer) for layer in layers]
    scatter(scattered, BLOCK_IDS, layout, segment)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(scattered, layers, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_isa_that_vllm_picks_on_this_machine_has_a_layout(dtype, head_dim):
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    if current_platform.get_cpu_architecture().name != "X86":
        pytest.skip("only x86 layouts are verified")
    isa = _get_attn_isa(dtype, 32, head_dim, "auto")
    assert cpu_layout_for(isa, 32, 2, head_dim, dtype).head_dim == head_dim


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("block_size", "rank", "rope"), [(16, 512, 64), (32, 512, 64), (64, 256, 64)])
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "with other layers' blocks between"])
def test_latents_written_by_vllm(dtype, block_size, rank, rope, padded):
    """As vLLM's reference backend for latent attention puts them into the cache that it has bound."""
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    layout = PagedLayout(LayoutKind.LATENT, block_size, 1, rank + rope, dtype)
    generator = torch.Generator().manual_seed(rank)
    tokens = len(BLOCK_IDS) * block_size
    segment = torch.randn(2, 1, tokens, 1, rank + rope, generator=generator).to(dtype)
    slots = torch.cat([torch.arange(block_size) + block * block_size for block in BLOCK_IDS])

    def cache():
        if padded:
            return torch.zeros(NUM_BLOCKS, 3, *layout.block_shape, dtype=dtype)[:, 1]
        return torch.zeros(NUM_BLOCKS, *layout.block_shape, dtype=dtype)

    layers = []
    for latents in segment[:, 0, :, 0]:
        bound = torch.zeros(NUM_BLOCKS, *layout.block_shape, dtype=dtype)
        update = CPUMLAImpl.do_kv_cache_update
        update(None, latents[:, :rank], latents[:, None, rank:], bound.squeeze(1), slots, "auto", torch.ones(1))
        layers.append(cache())
        layers[-1].copy_(bound)

    gathered = torch.empty_like(segment)
    gather(layers, BLOCK_IDS, layout, gathered)
    assert torch.equal(gathered, segment)

    scattered = [cache() for _ in layers]
    scatter(scattered, BLOCK_IDS, layout, segment)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(scattered, layers, strict=True))
