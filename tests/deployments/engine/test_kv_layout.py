"""What a stored segment holds is what the model computes: K after RoPE and V, as a transformers forward has them."""

from __future__ import annotations

from pathlib import Path

import torch
from kv_layout import check_segments
from live_engine import LiveEngine


def test_segments_hold_what_a_transformers_forward_computes(engine: LiveEngine, demo_model: Path) -> None:
    check_segments(engine, demo_model, torch.float32, 1e-4)
