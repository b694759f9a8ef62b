"""A folder in which all files of a model are there and whole, for what is checked before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_model(folder: Path, **config: Any) -> Path:
    """Write the files of a model of 4,096 tokens; `config`: more of its config.json."""
    folder.mkdir(exist_ok=True)
    write_json(
        folder / "config.json",
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 4096, **config},
    )
    write_json(folder / "tokenizer.json", {"model": {"type": "BPE"}})
    write_json(folder / "tokenizer_config.json", {"chat_template": TEMPLATE})
    write_weights(folder / "model.safetensors")
    return folder


def write_json(file: Path, content: object) -> None:
    """Write one value as JSON."""
    file.write_text(json.dumps(content), encoding="utf-8")


def write_weights(file: Path, nbytes: int = 16) -> None:
    """Write one tensor of so many bytes as safetensors has it."""
    header = json.dumps({"weight": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))
