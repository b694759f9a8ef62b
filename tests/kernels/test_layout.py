import pytest
import torch

from kernels.paged.layout import LayoutKind, PagedLayout, cpu_layout_for


@pytest.mark.parametrize(
    ("isa", "kind"), [("vec", LayoutKind.CPU_VEC), ("vec16", LayoutKind.CPU_VEC), ("amx", LayoutKind.CPU_AMX)]
)
def test_cpu_isa_names_its_layout(isa, kind):
    assert cpu_layout_for(isa, 32, 2, 64, torch.bfloat16) == PagedLayout(kind, 32, 2, 64, torch.bfloat16)


@pytest.mark.parametrize("isa", ["neon", "rvv", "vxe", "vsx", "amx_fp8", ""])
def test_unverified_isa_is_refused_by_name(isa):
    with pytest.raises(ValueError, match=f"isa {isa!r}"):
        cpu_layout_for(isa, 32, 2, 64, torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "block_size", "num_kv_heads", "head_dim", "dtype", "names"),
    [
        (LayoutKind.CPU_VEC, 24, 2, 64, torch.bfloat16, "block_size 24"),
        (LayoutKind.CPU_VEC, 0, 2, 64, torch.bfloat16, "block_size 0"),
        (LayoutKind.CPU_VEC, 32, 2, 40, torch.bfloat16, "head_dim 40"),
        (LayoutKind.CPU_VEC, 32, 0, 64, torch.bfloat16, "num_kv_heads"),
        (LayoutKind.CPU_VEC, 32, 2, 64, torch.uint8, "uint8"),
        (LayoutKind.CPU_VEC, 32, 2, 64, torch.int32, "dtype torch.int32"),
        (LayoutKind.LATENT, 16, 2, 576, torch.bfloat16, "1 for latents"),
        (LayoutKind.LATENT, 16, 1, 0, torch.bfloat16, "head_dim 0"),
        (LayoutKind.OPAQUE, 32, 2, 64, torch.bfloat16, "bfloat16"),
        (LayoutKind.CPU_AMX, 32, 2, 80, torch.bfloat16, "head_dim 80"),
        (LayoutKind.CPU_AMX, 48, 2, 64, torch.bfloat16, "block_size 48"),
        (LayoutKind.CPU_AMX, 32, 2, 64, torch.float16, "torch.float16"),
    ],
)
def test_impossible_shape_is_refused_by_name(kind, block_size, num_kv_heads, head_dim, dtype, names):
    with pytest.raises(ValueError, match=names):
        PagedLayout(kind, block_size, num_kv_heads, head_dim, dtype)
