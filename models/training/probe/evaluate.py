"""Held-out two-hop questions, from a whole prefill and from documents whose KV was computed alone.

RoPE makes attention depend on distances only.  So KV of a document computed alone and moved to its place equals KV
computed at that place by tokens that see nothing before their document: one forward pass under a mask measures what
naively joined KV answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.training.dialogue import Dialogue, encode
from models.training.probe.prompts import heldout_dialogue
from models.training.tokenizer import ASSISTANT, DOC, END


@dataclass(frozen=True)
class Tally:
    """Two-hop questions asked, and the right ones: by a whole prefill, and from documents that were read alone."""

    asked: int
    full: int
    alone: int


def document_spans(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, int]]:
    """[start, stop) of each document, its mark included."""
    vocabulary = tokenizer.get_vocab()
    starts = [place for place, token in enumerate(ids) if token == vocabulary[DOC]]
    stop = ids.index(vocabulary[END], starts[-1])
    return list(zip(starts, [*starts[1:], stop], strict=True))


def alone_mask(length: int, spans: list[tuple[int, int]], dtype: torch.dtype) -> torch.Tensor:
    """(1, 1, length, length) additive: causal, and a document's tokens see nothing before their document."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    for start, stop in spans:
        seen[start:stop, :start] = False
    mask = torch.zeros(length, length, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return mask[None, None]


def _right(predicted: list[int], ids: list[int], dialogue: Dialogue, tokenizer: PreTrainedTokenizerFast) -> int:
    mark, position, right = tokenizer.get_vocab()[ASSISTANT], 0, 0
    for turn in dialogue.turns:
        position = ids.index(mark, position) + 1
        end = position + len(tokenizer.encode(turn.answer, add_special_tokens=False)) + 1
        right += predicted[position - 1 : end - 1] == ids[position:end]
        position = end
    return right


@torch.no_grad()
def tally(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    context: int,
    conversations: int,
    seed: int,
    naive: bool = True,
) -> Tally:
    """Whole answers as greedy decoding writes them, over held-out conversations; `naive` false: `alone` stays 0."""
    asked = full = alone = 0
    for number in range(conversations):
        dialogue = heldout_dialogue(seed + number, context)
        ids, _ = encode(dialogue, tokenizer, frozenset())
        inputs = torch.tensor([ids])
        asked += len(dialogue.turns)
        full += _right(model(inputs).logits[0].argmax(-1).tolist(), ids, dialogue, tokenizer)
        if naive:
            mask = alone_mask(len(ids), document_spans(ids, tokenizer), model.dtype)
            logits = model(inputs, attention_mask=mask).logits[0]
            alone += _right(logits.argmax(-1).tolist(), ids, dialogue, tokenizer)
    return Tally(asked, full, alone)
