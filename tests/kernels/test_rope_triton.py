"""Triton's shift of keys gives the reference's bits, under its interpreter on the CPU and compiled on a GPU.

Each runs in a process of its own, in which this file is the program, as in ``test_quant_triton.py``.
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
STYLES = ("neox", "gptj")
TRIALS = 4


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed: vLLM's wheel brings it")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_triton_shift_equals_reference(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    command = [sys.executable, __file__, device]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert result.stdout == f"{2 * len(DTYPES) * len(STYLES) * TRIALS} comparisons\n"


def main(device):
    from kernels.rope.reference import shift_keys_reference
    from kernels.rope.shift import rotation
    from kernels.rope.triton import shift_keys_triton

    rng, comparisons = random.Random(5), 0
    for dtype in DTYPES:
        for style in STYLES * TRIALS:
            tokens, half = rng.randint(1, 5), rng.choice([1, 5, 16, 32])
            k = torch.randn(tokens, rng.randint(1, 3), 2 * half + rng.choice([0, 6])).to(dtype).to(device)
            deltas = torch.tensor([rng.choice([0, 1, -7, 70_000]) for _ in range(tokens)], device=device)
            turn = rotation(deltas, torch.rand(half).to(device), tokens)
            exact = torch.empty_like(k, dtype=torch.float32)
            shift_keys_reference(k.float(), turn, style, exact)
            expected = rounded(exact, dtype)
            out = torch.empty_like(k)
            shift_keys_triton(k, turn, style, out)
            shift_keys_triton(k, turn, style, k)
            for shifted in (out, k):
                assert torch.equal(shifted.view(torch.uint8), expected.view(torch.uint8)), (dtype, style, k.shape)
                comparisons += 1
    print(comparisons, "comparisons")


def rounded(exact, dtype):
    """Triton's interpreter cuts a float32 off to a bfloat16, where a GPU rounds it."""
    if dtype is torch.bfloat16 and exact.is_cpu:
        return (exact.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    return exact.to(dtype)


if __name__ == "__main__":
    main(sys.argv[1])
