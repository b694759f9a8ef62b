"""What budgets cost on prompts: the next token's KL against the KV as it was computed, and answers lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.sparse.section import SparseForm
from kvmanager.extensions.sparse.budgets import Budgets
from load_tests.codec.model import divergence
from load_tests.codec.profile_measure import Sample
from load_tests.codec.questions import Conversation
from load_tests.sparse.choices import SparseKV, sparse_kv
from load_tests.sparse.masked_model import MaskedModel

Answers = Sequence[tuple[int, int]]
"""[first, last + 1) of each answer in what follows the prefix."""


@dataclass(frozen=True)
class Held:
    """A prompt, its prefix's KV and mass, and what the model says of the rest from that KV as it is."""

    rest: list[int]
    kv: torch.Tensor
    mass: torch.Tensor
    judged: list[int]
    """Positions in `rest` whose next token counts."""
    logits: torch.Tensor
    """(judged, vocabulary)"""
    answers: Answers = ()
    kinds: tuple[str, ...] = ()
    right: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Cost:
    """Of one way to store, over all prompts."""

    kl: float
    """Mean, in nats."""
    worst_kl: float
    """Of the kind of question with the most; the mean again where there are no kinds."""
    questions: int
    lost: int
    """Questions answered right from the KV as it was, and wrong now."""
    gained: int
    changed: int
    """Questions whose greedy answer is another one now."""
    kept: float
    """The part of all KV that is kept."""
    raw_bytes: int
    coded_bytes: int
    by_kind: dict[str, float]

    def as_row(self) -> dict[str, Any]:
        """For a table and a report."""
        smaller = {"times_smaller_than_bf16": self.raw_bytes / self.coded_bytes} if self.coded_bytes else {}
        names = ("kept", "kl", "worst_kl", "questions", "lost", "gained", "changed")
        return {name: getattr(self, name) for name in names} | smaller


def hold(model: MaskedModel, prompts: Iterable[Conversation | Sample]) -> list[Held]:
    """Compute each prefix and what is said after it."""
    held = []
    for prompt in prompts:
        kv, mass = model.prefix(prompt.prefix)
        logits = model.continued(kv, prompt.rest, None)
        if isinstance(prompt, Conversation):
            spans = [at for first, end in prompt.answers for at in range(first - 1, end - 1)]
            right = tuple(_greedy(logits, prompt.rest, span) for span in prompt.answers)
            held.append(
                Held(prompt.rest, kv, mass, spans, logits[spans], prompt.answers, prompt.kinds, right)
            )  # fmt: skip
        else:
            judged = list(range(len(prompt.rest))) if prompt.judged is None else prompt.judged
            held.append(Held(prompt.rest, kv, mass, judged, logits[judged]))
    return held


def cost_of(model: MaskedModel, held: Sequence[Held], budgets: Budgets, form: SparseForm | None = None) -> Cost:
    """What all prompts lose by it."""
    return cost_of_kv(model, held, [sparse_kv(one.kv, one.mass, budgets, form) for one in held])


def cost_of_kv(model: MaskedModel, held: Sequence[Held], stored: Iterable[SparseKV]) -> Cost:
    """The same for KV that was made sparse otherwise; one for each prompt."""
    all_kl: list[torch.Tensor] = []
    by_kind: dict[str, list[torch.Tensor]] = {}
    lost = gained = changed = questions = kept = total = raw = coded = 0
    for one, sparse in zip(held, stored, strict=True):
        logits = model.continued(sparse.kv, one.rest, sparse.kept)
        kl = divergence(one.logits, logits[one.judged])
        all_kl.append(kl)
        same = one.logits.argmax(-1) == logits[one.judged].argmax(-1)
        at = 0
        for number, (first, end) in enumerate(one.answers):
            by_kind.setdefault(one.kinds[number], []).append(kl[at : at + end - first])
            changed += not bool(same[at : at + end - first].all())
            at += end - first
            now = _greedy(logits, one.rest, (first, end))
            lost += one.right[number] and not now
            gained += now and not one.right[number]
        questions += len(one.answers)
        kept += int(sparse.kept.sum())
        total += sparse.kept.numel()
        raw += sparse.raw_bytes
        coded += sparse.coded_bytes
    means = {kind: float(torch.cat(parts).mean()) for kind, parts in by_kind.items()}
    mean = float(torch.cat(all_kl).mean())
    return Cost(
        mean, max(means.values(), default=mean), questions, lost, gained, changed, kept / total, raw, coded, means
    )  # fmt: skip


def _greedy(logits: torch.Tensor, rest: Sequence[int], span: tuple[int, int]) -> bool:
    """Whether the greedy answer is the expected one: the first choice is right at each of its tokens."""
    first, end = span
    return bool(logits[first - 1 : end - 1].argmax(-1).tolist() == list(rest[first:end]))
