"""Writing the model that the rest of the project loads: bf16 safetensors, configuration, tokenizer."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

from transformers import GenerationConfig, LlamaForCausalLM

from models.training.tokenizer import build_tokenizer, save_tokenizer


def export(model: LlamaForCausalLM, folder: Path) -> None:
    """Write `model` in bf16 with its tokenizer into `folder`, file by file, each replaced atomically.

    A reader sees an old file or a new one, never half of one: an engine can load `folder` while training exports to it.
    """
    tokenizer = build_tokenizer()
    frozen = copy.deepcopy(model)
    frozen.bfloat16()
    frozen.set_attn_implementation("sdpa")
    frozen.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as scratch:
        frozen.save_pretrained(scratch)
        save_tokenizer(Path(scratch))
        for file in Path(scratch).iterdir():
            target = folder / file.name
            if not target.exists() or target.read_bytes() != file.read_bytes():
                file.replace(target)
