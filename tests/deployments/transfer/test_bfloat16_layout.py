"""A stored segment of the type of most models holds what the model computes; float32: `engine/test_kv_layout.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kv_layout import check_segments
from live_engine import LiveEngine


def test_segments_hold_what_a_transformers_forward_computes_in_bfloat16(own_engine: Any, demo_model: Path) -> None:
    engine = own_engine.start(lambda: LiveEngine(demo_model, "bfloat16"), LiveEngine.close)
    check_segments(engine, demo_model, torch.bfloat16, 0.02)
