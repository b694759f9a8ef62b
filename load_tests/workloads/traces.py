"""Mooncake's conversation trace at a reduced scale: when requests came, how long they were, and what they shared.

Source: Qin et al., *Mooncake: Trading More Storage for Less Computation* (FAST 2025), and the trace published with it
(github.com/kvcache-ai/Mooncake, ``FAST25-release/traces``), read by `load_tests.simulator.trace`. A block of the trace,
512 tokens there and ``block_tokens`` here, becomes a text that follows from its number alone: prompts share here
exactly the blocks that they shared there. Answers shrink by the same factor.
"""

from __future__ import annotations

import random
from pathlib import Path

from configs.model_folder import PROJECT_ROOT
from load_tests.simulator.trace import BLOCK_TOKENS, TraceRequest, read_trace
from load_tests.workloads.limits import at_least, fits, positive
from load_tests.workloads.prefixes import mark_returning
from load_tests.workloads.words import Words
from load_tests.workloads.workload import Message, Request, Workload

NAME = "conversation-trace"
TRACES = tuple(root / "shared" / "data" / "conversation_trace.jsonl" for root in (PROJECT_ROOT, PROJECT_ROOT.parent))
"""Where it is looked for: in the repository, then next to it."""


def conversation_trace(
    rng: random.Random,
    text: Words,
    *,
    requests: int = 100,
    block_tokens: int = BLOCK_TOKENS,
    rate_scale: float = 1.0,
    trace: Path | str | None = None,
    max_model_tokens: int | None = None,
) -> Workload:
    """The trace's first ``requests`` requests, ``rate_scale`` times as many a second as recorded.

    ``trace`` is a file in Mooncake's format; None: the first of `TRACES` that is there. Raises ValueError for what
    cannot be, for no such file, and for a broken one (`load_tests.simulator.trace.TraceError`).
    """
    at_least(1, requests=requests, block_tokens=block_tokens)
    positive(rate_scale=rate_scale)
    trace = _found(trace)
    recorded = read_trace(trace, requests)
    if len(recorded) < requests:
        raise ValueError(f"{trace} has {len(recorded)} requests, {requests} were asked for.")
    blocks = _Blocks(rng, text, block_tokens)
    for one in recorded:
        fits(
            blocks.scaled(one.input_tokens),
            1,
            blocks.scaled(one.output_tokens),
            max_model_tokens,
            "ask for a smaller block_tokens",
        )
    made = [
        Request(
            number=number,
            session=f"request {number}",
            at_s=(one.timestamp_s - recorded[0].timestamp_s) / rate_scale,
            after=None,
            messages=(Message("user", blocks.prompt(one)),),
            max_tokens=blocks.scaled(one.output_tokens),
        )
        for number, one in enumerate(recorded)
    ]
    return Workload(NAME, mark_returning(made, text.characters_per_token), None, text.characters_per_token)


def _found(trace: Path | str | None) -> Path:
    files = TRACES if trace is None else (Path(trace),)
    for file in files:
        if file.exists():
            return file
    raise ValueError(
        f"there is no {files[-1]}; put conversation_trace.jsonl of github.com/kvcache-ai/Mooncake there or name it."
    )


class _Blocks:
    """Texts for the numbers of blocks."""

    def __init__(self, rng: random.Random, text: Words, block_tokens: int) -> None:
        self._seed = rng.getrandbits(64)
        self._text = text
        self._block_tokens = block_tokens

    def scaled(self, tokens: int) -> int:
        """Tokens of the trace as tokens here, at least one."""
        return max(1, round(tokens * self._block_tokens / BLOCK_TOKENS))

    def prompt(self, request: TraceRequest) -> str:
        """All blocks' texts, the last one as long as the request leaves it."""
        whole = len(request.hash_ids) - 1
        lengths = [self._block_tokens] * whole
        lengths.append(max(1, self.scaled(request.input_tokens) - whole * self._block_tokens))
        return " ".join(self._block(*block) for block in zip(request.hash_ids, lengths, strict=True))

    def _block(self, hash_id: int, tokens: int) -> str:
        return self._text(random.Random(f"{self._seed}/{hash_id}"), tokens)
