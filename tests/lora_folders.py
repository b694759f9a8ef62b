"""Folders of LoRA adapters as PEFT saves them, for the demo model's kind of layers; weights are drawn from a seed."""

from __future__ import annotations

import json
from pathlib import Path


def write_adapter(folder: Path, model: Path, seed: int, rank: int = 4) -> Path:
    """An adapter of all attention projections of the Llama-like model in the folder `model`."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, heads, kv_heads = (
        config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"],
    )  # fmt: skip
    dim = config.get("head_dim") or hidden // heads
    sizes = {"q_proj": (hidden, heads * dim), "k_proj": (hidden, kv_heads * dim), "v_proj": (hidden, kv_heads * dim),
             "o_proj": (heads * dim, hidden)}  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (width, out) in sizes.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(rank, width, generator=draw) * 0.3
            weights[f"{stem}.lora_B.weight"] = torch.randn(out, rank, generator=draw) * 0.3
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
    return folder
