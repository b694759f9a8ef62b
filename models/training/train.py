"""The training loop: seeded, resumable, one core.

A step's samples follow from (seed, step) and its stage and learning rate from the tokens trained so far, so the state
is the weights, the optimizer and three counters.  Killing the process loses the steps since the last checkpoint.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.training import attention, curriculum
from models.training.architecture import MAX_POSITIONS, build_model
from models.training.dialogue import KEY_WEIGHT, READ_WEIGHT
from models.training.evaluate import MONITOR_SEED, exact_match
from models.training.export import export
from models.training.tokenizer import build_tokenizer

PEAK_RATE = 1.5e-3
FINAL_RATE = 1e-4
WARM_UP_TOKENS = 150_000
DECAY_FROM = 0.3  # of all tokens
CLIP_NORM = 1.0
MICRO_TOKENS = 3_000


@dataclass
class State:
    """Where a run stands."""

    seed: int
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def learning_rate(tokens: int, total: int) -> float:
    """Warm-up, constant, then linear decay to `FINAL_RATE`."""
    if tokens < WARM_UP_TOKENS:
        return PEAK_RATE * (0.1 + 0.9 * tokens / WARM_UP_TOKENS)
    progress = tokens / total
    if progress < DECAY_FROM:
        return PEAK_RATE
    return PEAK_RATE + (FINAL_RATE - PEAK_RATE) * min(1.0, (progress - DECAY_FROM) / (1 - DECAY_FROM))


def collate(samples: list[curriculum.Sample], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and loss weights, each (samples, longest); causal attention needs no mask for it."""
    longest = min(MAX_POSITIONS, max(len(ids) for ids, _ in samples))
    ids = torch.full((len(samples), longest), pad)
    weights = torch.zeros(len(samples), longest)
    for row, (sample_ids, sample_weights) in enumerate(samples):
        length = min(longest, len(sample_ids))
        ids[row, :length] = torch.tensor(sample_ids[:length])
        weights[row, :length] = torch.tensor(sample_weights[:length])
    return ids, weights


def micro_batches(samples: list[curriculum.Sample], pad: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`samples` sorted by length and cut into batches of about `MICRO_TOKENS`: little padding, small working set."""
    groups: list[list[curriculum.Sample]] = [[]]
    for sample in sorted(samples, key=lambda sample: len(sample[0])):
        if groups[-1] and (len(groups[-1]) + 1) * len(sample[0]) > MICRO_TOKENS:
            groups.append([])
        groups[-1].append(sample)
    return [collate(group, pad) for group in groups]


def weighted_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum of weighted cross-entropies; how many key words would be generated right; how many there are."""
    target, weight = ids[:, 1:].reshape(-1), weights[:, 1:].reshape(-1)
    # Of the tokens that are only read, every fourth stands for all: logits are a tenth of the work.
    read = weight == READ_WEIGHT
    chosen = (weight > READ_WEIGHT) | (read & (torch.arange(len(weight)) % 4 == 0))
    target, weight = target[chosen], torch.where(read, weight * 4, weight)[chosen]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(ids[:, :-1]).last_hidden_state
        logits = model.lm_head(hidden.reshape(-1, hidden.shape[-1])[chosen]).float()
    losses = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    key = weight >= KEY_WEIGHT
    right = (logits.detach()[key].argmax(-1) == target[key]).sum()
    return (losses * weight).sum(), right, key.sum()


class TrainingRun:
    """One run in `work`, with checkpoints: a stopped run goes on where it was."""

    optimizer: torch.optim.Optimizer

    def __init__(self, work: Path, model: LlamaForCausalLM, seed: int) -> None:
        self.work = work
        self.work.mkdir(parents=True, exist_ok=True)
        self.tokenizer: PreTrainedTokenizerFast = build_tokenizer()
        self.model = model
        attention.register()
        self.model.set_attn_implementation(attention.NAME)
        self.state = State(seed)

    @property
    def checkpoint(self) -> Path:
        """The file a restarted run goes on from."""
        return self.work / "checkpoint.pt"

    def load(self) -> None:
        """Go on from the checkpoint, where there is one."""
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.state = State(**saved["state"])

    def save(self) -> None:
        """Write the checkpoint atomically."""
        scratch = self.checkpoint.with_suffix(".tmp")
        torch.save(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "state": asdict(self.state)},
            scratch,
        )
        scratch.replace(self.checkpoint)


class Trainer(TrainingRun):
    """A run that draws a curve, and exports the model into `demo`."""

    def __init__(self, work: Path, demo: Path, seed: int, fresh: bool = False) -> None:
        tokenizer = build_tokenizer()
        model = build_model(
            tokenizer.get_vocab(), tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, seed
        )
        super().__init__(work, model, seed)
        self.demo = demo
        self.keys = curriculum.key_ids(self.tokenizer)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.97), fused=True)
        if not fresh:
            self.load()

    def step(self) -> tuple[float, float]:
        """One optimizer step; loss and key-word accuracy of its batch."""
        state = self.state
        samples = curriculum.batch(state.seed, state.step, state.tokens, self.tokenizer, self.keys)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(state.tokens, curriculum.total_tokens())
        self.optimizer.zero_grad(set_to_none=True)
        whole = sum(sum(weights[1:]) for _, weights in samples)
        loss = right = keys = 0.0
        for ids, weights in micro_batches(samples, self.tokenizer.pad_token_id):
            part, part_right, part_keys = weighted_loss(self.model, ids, weights)
            (part / whole).backward()
            loss += part.item() / whole
            right += part_right.item()
            keys += part_keys.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        state.step += 1
        state.tokens += sum(len(sample_ids) for sample_ids, _ in samples)
        return loss, right / max(keys, 1.0)

    def run(self, every: int = 100, exports: bool = True) -> None:
        """Train to the end of the curriculum; checkpoint, measure and export every `every` steps."""
        total = curriculum.total_tokens()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        began, before = time.monotonic(), self.state.seconds
        loss_mean, accuracy_mean = 0.0, 0.0
        with Progress(*columns, console=Console(), refresh_per_second=0.5) as progress:
            bar = progress.add_task("starting", total=total, completed=self.state.tokens)
            while curriculum.stage_at(self.state.tokens) is not None:
                loss, accuracy = self.step()
                share = 0.05 if loss_mean else 1.0
                loss_mean += share * (loss - loss_mean)
                accuracy_mean += share * (accuracy - accuracy_mean)
                self.state.seconds = before + time.monotonic() - began
                text = f"step {self.state.step} loss {loss_mean:.3f} key words right {accuracy_mean:.3f}"
                progress.update(bar, completed=self.state.tokens, description=text)
                if self.state.step % every == 0:
                    self._report(loss_mean, accuracy_mean, exports, progress.console)
            self._report(loss_mean, accuracy_mean, exports, progress.console)

    def _report(self, loss: float, accuracy: float, exports: bool, console: Console) -> None:
        self.save()
        if exports:
            export(self.model, self.demo)
        stage = curriculum.stage_at(self.state.tokens) or curriculum.STAGES[-1]
        context = min(1024, max(stage.contexts))
        self.model.eval()
        found = exact_match(self.model, self.tokenizer, context, prompts=16, seed=MONITOR_SEED)
        self.model.train()
        row = {**asdict(self.state), "loss": round(loss, 4), "accuracy": round(accuracy, 4), "context": context}
        row["seconds"] = round(self.state.seconds)
        heldout = {kind: round(right / asked, 2) for kind, (right, asked) in found.items()}
        row["heldout"] = heldout
        with (self.work / "curve.jsonl").open("a", encoding="utf-8") as curve:
            curve.write(json.dumps(row) + "\n")
        shown = " ".join(f"{kind} {share:.2f}" for kind, share in heldout.items())
        console.print(f"{self.state.tokens / 1e6:.2f}M tokens, held out at {context}: {shown}")
