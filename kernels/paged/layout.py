"""Memory layout of one layer of vLLM's paged KV cache, and of a segment.

A layer is one tensor of logical shape ``(blocks, kv_heads, block_size, 2 * head_dim)``. What the last two dimensions
hold is the attention backend's own affair: ``LayoutKind`` names the arrangements we know, from its sources.
A segment, which every tier stores, has one arrangement for all of them, so that a segment written by one machine is
readable by any other: ``[layer, k|v, token, kv_head, head_dim]``, contiguous. A latent is neither key nor value, but
what both are made of. There is one half of it: ``(blocks, 1, block_size, width)`` and ``[layer, 1, token, 1, width]``.
"""

import enum
from dataclasses import dataclass

import torch


class LayoutKind(enum.Enum):
    """The order of the elements inside a block. T is the block size, D the head dimension; all orders are row-major."""

    CPU_VEC = "cpu_vec"
    """CPU backend, isa "vec" and "vec16". Per head: K as ``[D, T]``, then V as ``[T, D]``.
    Source: vllm csrc/cpu/cpu_attn_vec.hpp, reshape_and_cache; cpu_attn_vec16.hpp inherits it."""

    CPU_AMX = "cpu_amx"
    """CPU backend, isa "amx", bfloat16: the operand tiles of TDPBF16PS. Per head: K as ``[T / 16, D / 2, 16, 2]`` =
    (token group, dim pair, token, dim), then V as ``[D / 16, T / 2, 16, 2]`` = (dim group, token pair, dim, token).
    Source: vllm csrc/cpu/cpu_attn_amx.hpp, reshape_and_cache."""

    CUDA_FLASH = "cuda_flash"
    """FlashAttention and Triton attention on CUDA. Per head and token: K's D elements, then V's. Any strides, so that
    both of vLLM's memory orders (NHD and HND) are views of this one.
    Source: vllm/v1/attention/backends/flash_attn.py, do_kv_cache_update."""

    LATENT = "latent"
    """Latent attention (MLA) on any device: per token its compressed KV, then the rotated part of its key, in one
    vector of ``head_dim`` elements, without a split. Any strides.
    Source: vllm/model_executor/layers/attention/mla_attention.py, bind_kv_cache ("[B, H=1, N, C]");
    v1/attention/backends/mla/cpu_mla.py, do_kv_cache_update."""

    OPAQUE = "opaque"
    """A block's bytes as they are, of a CPU backend's fp8 cache: which order they have is not known here. It
    must be the reader's order too: what decides it is in the model's identity."""


_KIND_OF_CPU_ISA = {"vec": LayoutKind.CPU_VEC, "vec16": LayoutKind.CPU_VEC, "amx": LayoutKind.CPU_AMX}

# Each kind counts tokens and dims in whole tiles of this many; vLLM's own kernels ask for the same or more.
_TILE = {LayoutKind.CPU_VEC: 16, LayoutKind.CPU_AMX: 32}
ON_ANY_DEVICE = frozenset({LayoutKind.CUDA_FLASH, LayoutKind.LATENT})
"""Kinds that are moved wherever the cache lies, whatever its strides."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The arrangement and the shape of every layer of one paged KV cache.

    Raises ValueError when no attention backend could have such a cache.
    """

    kind: LayoutKind
    block_size: int
    """Tokens per block."""
    num_kv_heads: int
    """KV heads per layer on this rank; 1 for latents."""
    head_dim: int
    """Elements per head, the same for K and V; of a latent all."""
    dtype: torch.dtype
    """Element type of the cache; of an opaque one, whose elements are not known, uint8."""

    def __post_init__(self) -> None:
        if (self.dtype is torch.uint8) != (self.kind is LayoutKind.OPAQUE):
            raise ValueError(f"an opaque cache is one of bytes (uint8), and no other is, got {self.dtype}")
        if self.kind is not LayoutKind.OPAQUE and self.dtype not in _DTYPES:
            raise ValueError(f"KV cache dtype {self.dtype} is not supported, only {', '.join(map(str, _DTYPES))}")
        if self.kind is LayoutKind.CPU_AMX and self.dtype is not torch.bfloat16:
            raise ValueError(f"vLLM uses the amx layout for bfloat16 only, not for {self.dtype}")
        if self.num_kv_heads < 1 or (self.kind is LayoutKind.LATENT and self.num_kv_heads != 1):
            raise ValueError(f"num_kv_heads must be at least 1, and 1 for latents, got {self.num_kv_heads}")
        tile = _TILE.get(self.kind, 1)
        if self.block_size < 1 or self.block_size % tile:
            raise ValueError(f"{self.kind.value}: block_size {self.block_size} is not n * {tile}")
        if self.head_dim < 1 or self.head_dim % tile:
            raise ValueError(f"{self.kind.value}: head_dim {self.head_dim} is not n * {tile}")

    @property
    def halves(self) -> int:
        """2 for keys and values, 1 for latents."""
        return 1 if self.kind is LayoutKind.LATENT else 2

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Shape of one block of one layer: ``(kv_heads, block_size, halves * head_dim)``."""
        return self.num_kv_heads, self.block_size, self.halves * self.head_dim

    def segment_shape(self, num_layers: int, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Shape of a segment of ``num_blocks`` blocks: ``(layer, half, token, kv_head, head_dim)``."""
        return num_layers, self.halves, num_blocks * self.block_size, self.num_kv_heads, self.head_dim


def cpu_layout_for(isa: str, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedLayout:
    """The layout that vLLM's CPU attention uses under ``isa`` (what its ``_get_attn_isa`` returns).

    Raises ValueError for an isa whose layout no test has held to vLLM's ("neon", "rvv", "vxe", "vsx"), and for a shape
    that the isa cannot have.
    """
    kind = _KIND_OF_CPU_ISA.get(isa)
    if kind is None:
        raise ValueError(f"no verified KV layout for CPU attention isa {isa!r}, only for {sorted(_KIND_OF_CPU_ISA)}")
    return PagedLayout(kind, block_size, num_kv_heads, head_dim, dtype)
