"""What stored segments hold, compared with what a transformers forward computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from live_engine import BLOCK, LiveEngine

from kvmanager.segments.format import body_offset, open_segment
from kvmanager.segments.spans import NodeKind, SegmentSpan
from load_tests.harness.engine import prompt


def check_segments(engine: LiveEngine, model: Path, dtype: torch.dtype, largest_error: float) -> None:
    """Have an engine with an empty device and port answer a long prompt, and compare all that it stored."""
    question = prompt(200, 700)  # more than one step computes, and no whole number of blocks
    answer, _ = engine.ask(question, max_tokens=70)
    reference = computed_by_transformers(model, question + answer, dtype)

    stored = list(engine.port.segments.values())
    assert sum(span.num_blocks for span, _ in stored) == (700 + 69) // BLOCK
    assert {span.kind for span, _ in stored} == {NodeKind.REQUEST, NodeKind.ANSWER}
    for span, sealed in stored:
        ours = values(engine, span, sealed, dtype)
        theirs = reference[:, :, span.start_block * BLOCK : span.end_block * BLOCK]
        for layer, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            for kind, k_or_v, expected in zip("KV", mine, other, strict=True):
                error = float((k_or_v - expected).norm() / expected.norm())
                assert error < largest_error, f"{kind} of layer {layer}, blocks from {span.start_block}"


def computed_by_transformers(model: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """`[layer, k|v, token, kv_head, head_dim]`, float32."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    with torch.inference_mode():
        cache = network(torch.tensor([tokens]), use_cache=True).past_key_values
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
    return torch.stack(layers).transpose(2, 3).float()


def values(engine: LiveEngine, span: SegmentSpan, sealed: bytes, dtype: torch.dtype) -> torch.Tensor:
    shape = engine.reuse.copier.layout.segment_shape(len(engine.reuse.copier.layers), span.num_blocks)
    name = str(dtype).removeprefix("torch.")
    payload = open_segment(
        sealed, key=span.key, fingerprint=engine.fingerprint, shape=shape, dtype=name, num_blocks=span.num_blocks
    )
    assert len(sealed) == body_offset(shape, name, span.num_blocks) + len(payload)
    return torch.from_numpy(np.array(payload)).view(dtype).view(shape).float()
