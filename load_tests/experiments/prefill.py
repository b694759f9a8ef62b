"""Experiments 1 to 3: what prefill costs, and what part of a request it is."""

from __future__ import annotations

from collections.abc import Sequence

from configs.settings import Settings
from load_tests.experiments.columns import MODEL, PROMPT, Column, Row, ms
from load_tests.experiments.experiment import Experiment, Panel, Point, by_model, runs, spread
from load_tests.experiments.sizes import Sizes
from load_tests.harness.engine_process import EngineProcess
from load_tests.measuring.report import bullets, listed

ANSWER = Column("answer_tokens", "answer", digits=0)
SHARE = Column("share", "share, %", 100, 0, spread=True)
SHARE_LABEL = "prefill's share of the latency, %"


class PrefillShare(Experiment):
    """How much of a chat request's time is prefill."""

    name = "prefill_share"
    title = "Prefill's share of a chat request"
    question = "What part of the end-to-end latency of a chat request is prefill, by model and prompt length?"
    setting = "kv.enabled"
    columns = (MODEL, PROMPT, ms("prefill_s", "prefill"), ms("total_s", "end to end"), SHARE)
    panels = (Panel("prompt_tokens", ("share",), "prompt, tokens", SHARE_LABEL, scale=100, ylog=False),)
    sample = ("prompt_tokens", 3)
    longest = 4096

    def values(self, sizes: Sizes, model: str) -> list[Row]:
        """A prompt length each; the answer is a chat's."""
        answer = {"answer_tokens": 32 if sizes.quick else 128}
        return [{"prompt_tokens": tokens, **answer} for tokens in sizes.prompts(model, self.longest)]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """One request at a time."""
        found = runs(point, engine, [point.values["prompt_tokens"]], point.values["answer_tokens"])
        times = [run["requests"][0] for run in found]
        return [
            {
                **spread("prefill_s", [one[0] for one in times]),
                **spread("total_s", [one[-1] for one in times]),
                **spread("share", [one[0] / one[-1] for one in times]),
            }
        ]

    def conclusion(self, rows: Sequence[Row]) -> str:
        """What `kv.enabled` can save."""
        parts = []
        for model, own in by_model(rows).items():
            short, long = own[0], own[-1]
            parts.append(
                f"{model}: {100 * short['share']:.0f} % at {short['prompt_tokens']:,} tokens, "
                f"{100 * long['share']:.0f} % at {long['prompt_tokens']:,}."
            )
        most = max(row["share"] for row in rows)
        verdict = "stays on by default" if most >= 0.25 else "has little to save here, though it is on by default"
        return (
            f"`kv.enabled` {verdict}. Prefill is the most that reuse can take away: up to {100 * most:.0f} % of a "
            f"request with {rows[0]['answer_tokens']} answered tokens.{bullets(parts)}"
        )


class PrefillLength(Experiment):
    """Prefill latency over the prompt's length, and what of it is there for every prompt."""

    name = "prefill_length"
    title = "Prefill latency by prompt length"
    question = "How does prefill latency grow from 0.1K to 16K tokens, and what is its fixed cost?"
    setting = "kv.segment_tokens"
    columns = (MODEL, PROMPT, ms("prefill_s", "prefill", 1))
    panels = (
        Panel("prompt_tokens", ("prefill_s",), "prompt, tokens", "prefill, s"),
        Panel("prompt_tokens", ("rate",), "prompt, tokens", "prefill, tokens/s"),
    )
    note = "Longest prompts by model: see Sizes."
    sample = ("prompt_tokens", 3)
    shortest = 16
    """One block and less: what is left then is the fixed cost."""

    def values(self, sizes: Sizes, model: str) -> list[Row]:
        """A prompt length each."""
        return [{"prompt_tokens": tokens} for tokens in [self.shortest, *sizes.prompts(model)]]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """One prompt at a time, one answered token; steps of the default size."""
        found = runs(point, engine, [point.values["prompt_tokens"]], 1)
        return [spread("prefill_s", [run["requests"][0][0] for run in found])]

    def plotted(self, row: Row) -> Row:
        """With tokens per second."""
        return {**row, "rate": row["prompt_tokens"] / row["prefill_s"]}

    def conclusion(self, rows: Sequence[Row]) -> str:
        """Whether a segment is long enough to be worth its handling."""
        segment = Settings().kv.segment_tokens
        parts, shares = [], []
        for model, own in by_model(rows).items():
            fixed, per_token, per_pair = fitted(own)
            cost = per_token * segment + per_pair * segment**2 / 2
            shares.append(fixed / (fixed + cost))
            growth = f"{1e3 * per_token * 1000:,.0f} ms per 1,000 tokens"
            if per_pair:
                growth += f", and twice that at token {per_token / per_pair:,.0f}" if per_token else ", and growing"
            parts.append(f"{model}: {1e3 * fixed:.1f} ms fixed, {growth}.")
        verdict = (
            "Most of what a segment costs is work that reuse saves: the default stays."
            if max(shares) < 0.5
            else "For some model the fixed part outweighs a segment's own work: a longer segment would save more."
        )
        return (
            f"Of computing `kv.segment_tokens` = {segment} tokens, {100 * min(shares):.0f} to "
            f"{100 * max(shares):.0f} % is a prompt's fixed cost. {verdict}{bullets(parts)}"
        )


def fitted(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Seconds: fixed, per token, per pair of tokens; least squares on relative errors, without negative terms.

    The model of `docs/concepts/loading.md`: prefill = fixed + per_token · n + per_pair · n² / 2.
    """
    import numpy as np

    lengths = np.array([row["prompt_tokens"] for row in rows], float)
    seconds = np.array([row["prefill_s"] for row in rows])
    terms = np.stack([np.ones_like(lengths), lengths, lengths**2 / 2], axis=1) / seconds[:, None]
    best, least = (0.0, 0.0, 0.0), float("inf")
    for chosen in ([0, 1, 2], [0, 1], [1, 2], [0, 2], [1], [2], [0]):  # of all subsets the best without negative terms
        if len(chosen) > len(rows):
            continue
        found, *_ = np.linalg.lstsq(terms[:, chosen], np.ones_like(lengths), rcond=None)
        error = float(((terms[:, chosen] @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            least = error
            filled = np.zeros(3)
            filled[chosen] = found
            best = (float(filled[0]), float(filled[1]), float(filled[2]))
    return best


class OutputShare(Experiment):
    """Prefill's share with the prompt fixed and the answer growing."""

    name = "output_share"
    title = "Prefill's share while the answer grows"
    question = (
        "With the prompt fixed, what share is prefill for answers from 1/160 to 1/2 of it (16K : 0.1K to 16K : 8K)?"
    )
    setting = "kv.save_answers"
    columns = (MODEL, PROMPT, ANSWER, ms("total_s", "end to end"), SHARE)
    panels = (Panel("part", ("share",), "answer ÷ prompt, tokens", SHARE_LABEL, scale=100, ylog=False),)
    note = (
        "Prompts are a quarter of each model's longest on this machine, shorter than 16K. The proportions of prompt "
        "and answer are the same."
    )
    sample = ("answer_tokens", 3)
    parts = (160, 64, 32, 16, 8, 4, 2)
    """Answers as parts of the prompt, from 16K : 0.1K to 16K : 8K."""

    def values(self, sizes: Sizes, model: str) -> list[Row]:
        """One: the times of the longest answer's tokens hold those of all shorter ones."""
        return [{"prompt_tokens": max(128, sizes.longest[model] // 4)}]

    def measure(self, point: Point, engine: EngineProcess) -> list[Row]:
        """One request at a time."""
        prompt = point.values["prompt_tokens"]
        answers = sorted({max(1, prompt // part) for part in self.parts})
        times = [run["requests"][0] for run in runs(point, engine, [prompt], answers[-1])]
        return [
            {
                "answer_tokens": answer,
                **spread("total_s", [one[answer - 1] for one in times]),
                **spread("share", [one[0] / one[answer - 1] for one in times]),
            }
            for answer in answers
        ]

    def plotted(self, row: Row) -> Row:
        """With the answer's length as a part of the prompt's."""
        label = f"{row['model']}, prompt {row['prompt_tokens']:,}"
        return {**row, "model": label, "part": row["answer_tokens"] / row["prompt_tokens"]}

    def conclusion(self, rows: Sequence[Row]) -> str:
        """Where decoding takes over."""
        halves, spared = [], []
        for model, own in by_model(rows).items():
            over = [row["answer_tokens"] / row["prompt_tokens"] for row in own if row["share"] < 0.5]
            halves.append(f"{100 * over[0]:.1f} % ({model})" if over else f"none that was measured ({model})")
            last = own[-1]
            again_s = last["share"] * last["total_s"] * last["answer_tokens"] / last["prompt_tokens"]
            spared.append(f"{again_s:.2g} s ({model})")
        shares = [own[-1]["share"] for own in by_model(rows).values()]
        return (
            "`kv.save_answers` spares computing an answer again as a part of the next prompt. For an "
            f"answer half as long as its prompt that takes about {listed(spared)}. Decoding takes more than half of "
            f"the time from this share of the prompt's length on: {listed(halves)}. At half the prompt's length "
            f"prefill's share is {100 * min(shares):.0f} to {100 * max(shares):.0f} %."
        )
