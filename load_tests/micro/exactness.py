"""Does reuse change answers? Conversations on a running server, with caches disturbed, against plain vLLM without any.

    python -m load_tests.micro.exactness --url http://127.0.0.1:8000 --model-folder models/demo --dtype float32

In float32 every token must be equal. In bfloat16 the order of additions shows, so the share of equal answers and the
largest difference of a logprob are printed, not judged.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from load_tests.harness.conversations import Plan, Turn, run
from load_tests.measuring import report
from load_tests.measuring.program import JsonFile, progress_bar


@dataclass(frozen=True)
class Verdict:
    """`max_logprob_difference` is taken over the tokens before an answer's first differing one."""

    conversations: int
    turns: int
    tokens: int
    different_answers: int
    max_logprob_difference: float
    prompt_tokens_by_source: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "equal_share": 1 - self.different_answers / max(1, self.turns)}


def plain_answers(turns: list[Turn], model: str, dtype: str) -> list[dict[str, Any]]:
    """The same requests, answered by plain vLLM in a process of its own."""
    longest = max(len(turn.prompt) + len(turn.answer) for turn in turns)
    job = {
        "model": model,
        "dtype": dtype,
        "max_model_len": longest,
        "requests": [{"prompt": turn.prompt, "max_tokens": len(turn.answer)} for turn in turns],
    }
    done = subprocess.run(
        [sys.executable, "-m", "load_tests.harness.plain_vllm"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def compare(turns: list[Turn], plain: list[dict[str, Any]], conversations: int) -> Verdict:
    """Token by token."""
    different, largest = 0, 0.0
    sources = dict.fromkeys(("device", "cpu", "redis", "recomputed"), 0)
    for turn, reference in zip(turns, plain, strict=True):
        different += turn.answer != reference["answer"]
        for ours, theirs, token, other in zip(
            turn.logprobs, reference["logprobs"], turn.answer, reference["answer"], strict=True
        ):
            if token != other:
                break
            largest = max(largest, abs(ours - theirs))
        for source in sources:
            sources[source] += turn.kv_cache.get(source, 0)
    tokens = sum(len(turn.answer) for turn in turns)
    return Verdict(conversations, len(turns), tokens, different, largest, sources)


def main(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="The name that the server knows the model by.")] = "demo",
    model_folder: Annotated[
        str, typer.Option(help="The same model for plain vLLM: a folder or a hub id.")
    ] = "models/demo",
    dtype: Annotated[str, typer.Option(help="What the server runs in.")] = "float32",
    conversations: Annotated[int, typer.Option(min=1)] = 100,
    turns: Annotated[int, typer.Option(min=1)] = 3,
    parted: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of turns that leave the conversation at any token.")
    ] = 0.0,
    seed: int = 0,
    json_file: JsonFile = None,
) -> None:
    """Exit code 1 when an answer differs in float32."""
    plan = Plan(conversations=conversations, turns=turns, part_probability=parted, seed=seed)
    with progress_bar() as progress:
        bar = progress.add_task("conversations", total=conversations * turns)
        done = asyncio.run(run(url, model, plan, lambda: progress.advance(bar)))
        progress.add_task("plain vLLM answers the same", total=None)
        verdict = compare(done, plain_answers(done, model_folder, dtype), conversations)
    sentence = (
        f"{verdict.turns} answers, {verdict.tokens} tokens in {dtype}: {verdict.different_answers} differ; "
        f"largest logprob difference {verdict.max_logprob_difference:.2e}; "
        f"prompt tokens {verdict.prompt_tokens_by_source}"
    )
    report.deliver(sentence, verdict.as_dict(), json_file)
    raise typer.Exit(int(dtype == "float32" and verdict.different_answers > 0))


if __name__ == "__main__":
    typer.run(main)
