"""The committed demo model, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return DEMO


@pytest.fixture(scope="session")
def demo_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.fixture(scope="session")
def demo_model() -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16)
    return model.eval()
