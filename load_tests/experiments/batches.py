"""Experiments 5, 6 and 11: what a batch holds, what it costs, and how many tokens a pass should have."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.settings import Settings
from load_tests.experiments.columns import MODEL, Column, Row, mib, ms
from load_tests.experiments.experiment import Experiment, Panel, Point, by_model, runs, spread
from load_tests.experiments.sizes import WIDEST_STEP_TOKENS, Sizes
from load_tests.harness.engine_process import EngineProcess
from load_tests.measuring.report import bullets, listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCK_TOKENS = 32
BATCH = Column("batch", "batch", digits=0)


class BatchLimits(Experiment):
    """KV by batch size, and the batch where KV, not the processor, ends the throughput's growth."""

    prompt, answer = 96, 64
    request_blocks = -(-(prompt + answer) // BLOCK_TOKENS)
    pool_requests = 10
    """Whole requests whose KV the pool holds."""

    name = "batch_limits"
    title = "KV by batch size"
    question = "How does KV grow with the batch, and from which batch on does KV cap the throughput?"
    setting = "engine.device_blocks"
    columns = (
        MODEL,
        BATCH,
        Column("running", "most at once", digits=0),
        mib("kv_bytes", "KV held"),
        mib("pool_bytes", "pool"),
        Column("tokens_per_s", "answered tokens/s", 1, 0, spread=True),
    )
    panels = (
        Panel("batch", ("part",), "requests at once", "KV held, % of the pool", scale=100, ylog=False),
        Panel("batch", ("tokens_per_s",), "requests at once", "answered tokens/s"),
    )
    sample = ("batch", 3)
    note = f"Prompts of {prompt} and answers of {answer} tokens; a pool for the KV of {pool_requests} such requests."

    def values(self, sizes: Sizes, model: str) -> list[Row]:
        """A batch each."""
        blocks = self.pool_requests * self.request_blocks
        all_of_them = {"prompt_tokens": self.prompt, "answer_tokens": self.answer, "pool_blocks": blocks}
        return [{"batch": batch, **all_of_them} for batch in sizes.batches]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """The batch at once, in a pool of `pool_blocks`."""
        values = point.values
        batch, answer, pool = values["batch"], values["answer_tokens"], values["pool_blocks"]
        block_bytes = engine.call("kv_bytes_per_block")
        found = runs(point, engine, [values["prompt_tokens"]] * batch, answer, pool_blocks=pool)
        seconds = [max(times[-1] for times in run["requests"]) for run in found]
        steps = [step for run in found for step in run["steps"]]
        return [
            {
                **spread("tokens_per_s", [batch * answer / one for one in seconds]),
                "running": max(requests for _, requests, *_ in steps),
                "kv_bytes": max(held for *_, held in steps) * block_bytes,
                "pool_bytes": pool * block_bytes,
            }
        ]

    def plotted(self, row: Row) -> Row:
        """With KV held as a part of the pool."""
        return {**row, "part": row["kv_bytes"] / row["pool_bytes"]}

    def plot(self, rows: Sequence[Row], figure: Figure) -> None:
        """With a line where the pool is full."""
        super().plot(rows, figure)
        figure.axes[0].axhline(100, color="grey", linestyle="--")

    def conclusion(self, rows: Sequence[Row]) -> str:
        """What `engine.device_blocks` must be for `engine.max_num_seqs`."""
        settings = Settings()
        caps, gains = [], []
        for model, own in by_model(rows).items():
            capped = capped_batch(own)
            if capped is None:
                caps.append(f"more than {own[-1]['batch']} ({model})")
                continue
            caps.append(f"{capped} ({model})")
            if before := [row for row in own if row["batch"] < capped]:
                gain = own[-1]["tokens_per_s"] / before[-1]["tokens_per_s"]
                last, earlier = own[-1]["batch"], before[-1]["batch"]
                gains.append(f"{model}: batch {last} gives {gain:.2f} times the tokens/s of batch {earlier}.")
        tokens = (settings.device_blocks or 0) * settings.block_size_tokens
        seqs = settings.engine.max_num_seqs
        each = tokens // seqs
        return (
            f"`engine.device_blocks` by default holds {tokens:,} tokens. So all {seqs} requests of "
            f"`engine.max_num_seqs` run at once only while each has at most {each} tokens: raise it for longer ones. "
            f"The pool of this experiment is full from a batch of {listed(caps)}. Requests beyond it wait or lose "
            f"their KV to others.{bullets(gains)}"
        )


def capped_batch(rows: Sequence[Row]) -> int | None:
    """The smallest measured batch that filled the pool; None: none did."""
    return next((row["batch"] for row in rows if row["kv_bytes"] >= row["pool_bytes"]), None)


class MicroBatch(Experiment):
    """What more requests in a batch do to a prefill step, and to a decode step."""

    prompt, answer = 64, 12

    name = "micro_batch"
    title = "Micro-batch size"
    question = "How do prefill and decode latency grow with the number of requests in a batch?"
    setting = "engine.max_num_seqs"
    columns = (MODEL, BATCH, ms("prefill_s", "prefill step", 1), ms("decode_s", "decode step", 1))
    panels = (
        Panel(
            "batch", ("prefill_s", "decode_s"), f"requests in the batch ({prompt} tokens each)", "one step, ms", 1e3,
            tails=(", prefill", ", decode"),
        ),
        Panel(
            "batch", ("prefill", "decode"), "requests in the batch", "per token, ms", 1e3,
            tails=(", prefill", ", decode"),
        ),
    )  # fmt: skip
    sample = ("batch", 3)
    note = f"All prompts ({prompt} tokens each) in one step, then all decode together."

    def values(self, sizes: Sizes, model: str) -> list[Row]:
        """A batch each."""
        return [{"batch": batch, "prompt_tokens": self.prompt} for batch in sizes.batches]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """The step that prefills all prompts, and the median of those that decode all."""
        batch, prompt = point.values["batch"], point.values["prompt_tokens"]
        prompts = [prompt] * batch
        engine.call("run", prompts=prompts, max_tokens=self.answer, step_tokens=WIDEST_STEP_TOKENS)  # warms up
        prefills, decodes = [], []
        for run in runs(point, engine, prompts, self.answer, step_tokens=WIDEST_STEP_TOKENS):
            seconds = [(tokens, one) for tokens, _, one, _ in run["steps"]]
            prefills.append(next(one for tokens, one in seconds if tokens == batch * prompt))
            decodes.append(statistics.median(one for tokens, one in seconds if tokens == batch))
        return [{**spread("prefill_s", prefills), **spread("decode_s", decodes)}]

    def plotted(self, row: Row) -> Row:
        """With what a token costs."""
        each = {"prefill": row["prefill_s"] / row["batch"] / self.prompt, "decode": row["decode_s"] / row["batch"]}
        return {**row, **each}

    def conclusion(self, rows: Sequence[Row]) -> str:
        """Whether batching pays up to `engine.max_num_seqs`."""
        seqs = Settings().engine.max_num_seqs
        parts, gains = [], []
        for model, own in by_model(rows).items():
            first, last = own[0], own[-1]
            prefill, decode = (last[key] / first[key] for key in ("prefill_s", "decode_s"))
            gains.append(last["batch"] / decode)
            parts.append(f"{model}: a prefill step {prefill:.1f} times, a decode step {decode:.1f} times")
        batch = rows[-1]["batch"]
        verdict = (
            f"A batch pays in decoding: `engine.max_num_seqs` = {seqs} stays."
            if min(gains) > 1.2
            else f"A batch does not pay for every model, which a lower `engine.max_num_seqs` than {seqs} would suit."
        )
        return (
            f"{verdict} Decoding {batch} requests at once gives {min(gains):.1f} to {max(gains):.1f} times the "
            f"tokens/s of one. Steps with {batch} requests take this many times as long:{bullets(parts)}"
        )


class TokensPerPass(Experiment):
    """Forward latency over the tokens of one pass, on which SplitFuse's fixed budget rests.

    Holmes et al., "DeepSpeed-FastGen" (2024), section 3: a pass costs about the same until the processor is saturated,
    and linearly more after, so passes should have as many tokens as saturate it, and not more.
    """

    each = 64
    """Tokens of each sequence in a pass: so short that attention does not matter."""
    tokens = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
    quick_tokens = (1, 16, 64, 256, 1024)

    name = "tokens_per_pass"
    title = "Forward latency by tokens per pass"
    question = (
        "How long does one forward pass take by its number of tokens, and how many saturate the processor (SplitFuse)?"
    )
    setting = "engine.max_num_batched_tokens"
    columns = (
        MODEL,
        Column("tokens", "tokens in the pass", digits=0),
        ms("pass_s", "one pass", 1),
        Column("tokens_per_s", "tokens/s", digits=0),
    )
    panels = (
        Panel("tokens", ("pass_s",), "tokens in one pass", "one pass, ms", 1e3),
        Panel("tokens", ("tokens_per_s",), "tokens in one pass", "tokens/s"),
    )
    sample = ("tokens", 4)
    note = f"Sequences of {each} tokens, as many as make up the pass. A step is scheduling, forward pass and sampling."

    def values(self, sizes: Sizes, model: str) -> list[Row]:
        """Tokens of a pass each."""
        return [{"tokens": tokens} for tokens in (self.quick_tokens if sizes.quick else self.tokens)]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """One pass over sequences of `each` tokens, or over one shorter one."""
        tokens = point.values["tokens"]
        prompts = [self.each] * (tokens // self.each) if tokens >= self.each else [tokens]
        engine.call("run", prompts=prompts, max_tokens=1, step_tokens=WIDEST_STEP_TOKENS)  # warms up
        found = runs(point, engine, prompts, 1, step_tokens=WIDEST_STEP_TOKENS)
        passes = [next(seconds for count, _, seconds, _ in run["steps"] if count == tokens) for run in found]
        row = spread("pass_s", passes)
        return [row | {"tokens_per_s": tokens / row["pass_s"]}]

    def plot(self, rows: Sequence[Row], figure: Figure) -> None:
        """With a line at the setting's default."""
        super().plot(rows, figure)
        for axes in figure.axes:
            axes.axvline(Settings().max_num_batched_tokens, color="grey", linestyle="--")

    def conclusion(self, rows: Sequence[Row]) -> str:
        """What the token budget should be."""
        budget = Settings().max_num_batched_tokens
        parts, knees = [], []
        for model, own in by_model(rows).items():
            knee = saturating_tokens(own)
            knees.append(knee)
            largest = own[-1]
            parts.append(
                f"{model}: {knee:,}; a pass of {largest['tokens']:,} holds up everybody's decoding for "
                f"{largest['pass_s']:.2g} s"
            )
        if max(knees) <= budget:
            verdict = f"The default `engine.max_num_batched_tokens` = {budget:,} saturates every model"
            if max(knees) <= budget // 4:
                verdict += f", and {max(knees):,} would do so with shorter waits for decoding streams"
        else:
            verdict = (
                f"`engine.max_num_batched_tokens` = {budget:,} leaves throughput on the table; {max(knees):,} would not"
            )
        return f"{verdict}. Nine tenths of the best tokens/s need passes of this many tokens:{bullets(parts)}"


def saturating_tokens(rows: Sequence[Row]) -> int:
    """The fewest tokens with nine tenths of the best tokens/s of these rows."""
    best = max(row["tokens_per_s"] for row in rows)
    return min(row["tokens"] for row in rows if row["tokens_per_s"] >= 0.9 * best)
