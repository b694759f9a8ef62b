"""Imported first: vLLM's environment, and the way to the modules of tests/app, which the fuzzing serves with."""

import os
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0"
)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "app")]
