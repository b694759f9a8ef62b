"""The committed model answers held-out questions, and its card's numbers are the promised ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.training.card import cell, table
from models.training.evaluate import MEASURED_KINDS, ONE_HOP, exact_match

DOCUMENTS = [
    {"text": "Anna lives in Paris. Anna is a baker. Ben lives in Oslo. Ben has a dog."},
    {"text": "The red ball belongs to Anna. The blue box belongs to Ben."},
]
PLAIN = "\n".join(document["text"] for document in DOCUMENTS)

# Right answers out of all, by context: the least the card may say.
ONE_HOP_LEAST = {"256": 0.98, "512": 0.98, "1024": 0.98, "3000": 0.90}
TWO_HOP_LEAST = {"256": 0.90, "512": 0.90, "1024": 0.90}
NOT_SAID_LEAST = 0.80
NOT_SAID = ("unknown person", "unknown thing", "other color", "missing", "unanswerable")


def answer(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, str]],
    documents: list[dict[str, str]] | None = None,
) -> str:
    ids = tokenizer.apply_chat_template(
        messages, documents=documents, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert isinstance(ids, torch.Tensor)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


QUESTIONS = [
    ("Where does Anna live?", " Anna lives in Paris."),
    ("What does Anna do?", " Anna is a baker."),
    ("Who owns the blue box?", " The blue box belongs to Ben."),
    ("Where is the red ball?", " The red ball is with Anna in Paris."),
    ("Where does Zoe live?", " The documents do not say."),
]


@pytest.mark.parametrize("way", ["documents", "system", "user"])
def test_answers_over_several_turns_however_the_documents_arrive(
    demo_model: LlamaForCausalLM, demo_tokenizer: PreTrainedTokenizerFast, way: str
) -> None:
    messages = [{"role": "system", "content": PLAIN}] if way == "system" else []
    for index, (question, expected) in enumerate(QUESTIONS):
        asked = f"{PLAIN}\n{question}" if way == "user" and index == 0 else question
        messages.append({"role": "user", "content": asked})
        found = answer(demo_model, demo_tokenizer, messages, DOCUMENTS if way == "documents" else None)
        assert found == expected
        messages.append({"role": "assistant", "content": found})


def test_heldout_questions_are_answered(demo_model: LlamaForCausalLM, demo_tokenizer: PreTrainedTokenizerFast) -> None:
    tally = exact_match(demo_model, demo_tokenizer, context=256, prompts=8, seed=77_000, kinds=MEASURED_KINDS)
    assert cell(tally, ONE_HOP).share >= 0.9
    assert cell(tally, ("where",)).share >= 0.75


def test_a_greeting_is_answered_at_length_and_differently_when_sampled(
    demo_model: LlamaForCausalLM, demo_tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = demo_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    assert isinstance(ids, torch.Tensor)
    first = demo_model(ids).logits[0, -1].float()
    likely = (first.softmax(-1) > 0.05).sum().item()
    assert likely >= 3
    assert len(demo_tokenizer.encode(answer(demo_model, demo_tokenizer, [{"role": "user", "content": "Hello!"}]))) >= 32


def test_the_card_states_the_measured_counts_and_they_meet_the_promise(demo_folder: Path) -> None:
    measured = json.loads((demo_folder / "measured.json").read_text())
    tallies = {int(context): {k: tuple(v) for k, v in kinds.items()} for context, kinds in measured.items()}
    assert table(tallies) in (demo_folder / "README.md").read_text()
    for context, least in ONE_HOP_LEAST.items():
        assert cell(tallies[int(context)], ONE_HOP).share >= least
    for context, least in TWO_HOP_LEAST.items():
        assert cell(tallies[int(context)], ("where",)).share >= least
    for tally in tallies.values():
        assert cell(tally, ("unknown person",)).share >= NOT_SAID_LEAST
        assert cell(tally, NOT_SAID).share >= NOT_SAID_LEAST


def test_the_model_is_small_and_stock(demo_folder: Path) -> None:
    config = json.loads((demo_folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert config["max_position_embeddings"] >= 4096
    assert (demo_folder / "model.safetensors").stat().st_size <= 12e6
