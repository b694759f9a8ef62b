"""Triton's quantizers give the reference's bits: under its interpreter on the CPU, and compiled where there is a GPU.

Each runs in a process of its own, because Triton decides at its first import whether it interprets, and other tests'
vLLM has imported it by then. In that process this file is the program.
"""

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRIALS = 5  # of each kind and dtype: the interpreter takes milliseconds for what a GPU does in none


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed: vLLM's wheel brings it")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_triton_quantizers_equal_reference(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    command = [sys.executable, __file__, device]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert result.stdout == f"{6 * len(DTYPES) * TRIALS} comparisons\n"


def rounded(exact, dtype):
    """What the float32 ``exact`` is in ``dtype`` where the kernel ran. Triton's interpreter cuts a float32 off to a
    bfloat16, where a GPU rounds it."""
    if dtype is torch.bfloat16 and exact.is_cpu:
        return (exact.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return exact.to(dtype)


def same_bits(a, b):
    return a.dtype is b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def compare_groups(dtype, device, rng):
    from kernels import quant_reference, quant_triton

    bits, group = rng.randint(2, 8), rng.choice([1, 3, 16, 32, 40, 128])
    x = random_matrix(rng, group * rng.randint(1, 3), dtype, device)
    expected = quant_reference.quantize_groups_reference(x, bits, group)
    encoded = quant_triton.quantize_groups_triton(x, bits, group)
    out, exact = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    quant_triton.dequantize_groups_triton(*expected, bits, out)
    quant_reference.dequantize_groups_reference(*expected, bits, exact)
    return [*map(same_bits, encoded, expected), same_bits(out, rounded(exact, dtype))]


def compare_steps(dtype, device, rng):
    from kernels import quant_reference, quant_triton

    limit = rng.randint(1, 127)
    x = random_matrix(rng, rng.choice([1, 7, 128, 600]), dtype, device)
    step = torch.tensor([rng.choice([0.0, 0.25, 1.0, rng.random()]) for _ in range(x.shape[1])], device=device)
    expected = quant_reference.quantize_steps_reference(x, step, limit)
    out, exact = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
    quant_triton.dequantize_steps_triton(expected, step, limit, out)
    quant_reference.dequantize_steps_reference(expected, step, limit, exact)
    symbols = quant_triton.quantize_steps_triton(x, step, limit)
    return [same_bits(symbols, expected), same_bits(out, rounded(exact, dtype))]


def random_matrix(rng, columns, dtype, device):
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    x = torch.randn(rng.randint(1, 3), columns, generator=generator) * 10.0 ** rng.randint(-6, 3)
    if rng.random() < 0.3:
        odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
        x.view(-1)[torch.randint(x.numel(), (4,), generator=generator)] = odd
    return x.to(dtype).to(device)


def main(device):
    rng, comparisons = random.Random(5), 0
    for dtype in DTYPES:
        for compare in (compare_groups, compare_steps):
            for trial in range(TRIALS):
                equal = compare(dtype, device, rng)
                assert all(equal), (compare.__name__, dtype, trial, equal)
                comparisons += len(equal)
    print(comparisons, "comparisons")


if __name__ == "__main__":
    main(sys.argv[1])
