"""`python -m load_tests.simulator.lengths`: how well answers' lengths are ranked; docs/tools/simulator.md.

Replays a trace online through `kvmanager.scheduling.answer_lengths`: each prompt is estimated when it arrives, and an
answer is learned from once it has ended. Counted are pairs of requests that arrive within 64 arrivals of each other,
those of equal length left out: is the one with the larger estimate the one with the longer answer? A pair whose
estimates are equal counts half.

Exit codes: 0 done, 1 the result could not be written, 2 a word of the command cannot be used.
"""

import heapq
import json
import sys
import time
from collections.abc import Sequence
from math import log2
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvmanager.scheduling.answer_lengths import AnswerLengths, LengthEstimate
from load_tests.simulator.costs import Costs, CostsError
from load_tests.simulator.trace import BLOCK_TOKENS, TraceError, TraceRequest, block_key, read_trace

EXIT_FAILED, EXIT_INPUT = 1, 2
WINDOW = 64
"""Arrivals between the two of a pair, at most."""
COLUMNS = "| requests | share | pairs ranked rightly | by prompt length alone | mean error, log2 |"
ALL, KNOWN = "all", "with history"


def replay(trace: Sequence[TraceRequest], costs: Costs, most_nodes: int) -> dict[str, Any]:
    """Return the shares of pairs that are ranked rightly, of all requests and of those with history.

    A request has history when the trie knows more of it than its first block, which all requests of a trace may share.
    """
    began = time.perf_counter()
    lengths = AnswerLengths(1, most_nodes)
    running: list[tuple[float, int, Sequence[bytes], LengthEstimate]] = []
    arrived: list[_Arrived] = []
    spent = 0.0
    for number, request in enumerate(trace):
        while running and running[0][0] <= request.timestamp_s:
            _, of, hashes, estimate = heapq.heappop(running)
            lengths.learn(hashes, trace[of].input_tokens, estimate, trace[of].output_tokens)
        hashes = [block_key(block) for block in request.hash_ids[: request.input_tokens // BLOCK_TOKENS]]
        before = time.perf_counter()
        estimate = lengths.estimate(hashes, request.input_tokens)
        spent += time.perf_counter() - before
        arrived.append(
            _Arrived(
                log2(max(1, request.output_tokens)), estimate.prior, estimate.log2_tokens, estimate.known_blocks > 1
            )
        )
        ends = request.timestamp_s + request.input_tokens / costs.prefill_tokens_per_s
        ends += request.output_tokens * costs.decode_s_per_token
        heapq.heappush(running, (ends, number, hashes, estimate))
    rows = [_figures(name, arrived, kept) for name, kept in ((ALL, arrived), (KNOWN, [a for a in arrived if a.known]))]
    return {
        "requests": len(trace),
        "nodes": len(lengths),
        "estimate_us": round(1e6 * spent / len(trace), 1),
        "rows": rows,
        "seconds": round(time.perf_counter() - began, 1),
    }


class _Arrived:
    """One request: log2 of its answer's tokens, and what was thought of it."""

    __slots__ = ("known", "length", "prior", "trie")

    def __init__(self, length: float, prior: float, trie: float, known: bool) -> None:
        self.length, self.prior, self.trie, self.known = length, prior, trie, known


def _figures(name: str, everybody: Sequence[_Arrived], kept: Sequence[_Arrived]) -> dict[str, Any]:
    return {
        "requests": name,
        "share": len(kept) / len(everybody),
        "ranked_rightly": _ranked([(one.length, one.trie) for one in kept]),
        "ranked_by_prompt_length": _ranked([(one.length, one.prior) for one in kept]),
        "log2_error": sum(abs(one.length - one.trie) for one in kept) / max(1, len(kept)),
    }


def _ranked(pairs: Sequence[tuple[float, float]]) -> float:
    """The share of all pairs within `WINDOW` of each other; 0.5 where there is none."""
    right = counted = 0.0
    for first, (length, thought) in enumerate(pairs):
        for other_length, other_thought in pairs[first + 1 : first + WINDOW]:
            if length != other_length:
                counted += 1
                if thought == other_thought:
                    right += 0.5
                else:
                    right += (thought < other_thought) == (length < other_length)
    return right / counted if counted else 0.5


def table(found: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [COLUMNS, "|---" + "|---:" * 4 + "|"]
    for row in found["rows"]:
        shares = f"**{row['ranked_rightly']:.3f}** | {row['ranked_by_prompt_length']:.3f}"
        lines.append(f"| {row['requests']} | {row['share']:.0%} | {shares} | {row['log2_error']:.2f} |")
    return "\n".join(lines)


def main(
    trace: Annotated[str, typer.Option(help="A trace in Mooncake's format, JSON lines.")],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the trie at most.")] = 2**16,
    requests: Annotated[int | None, typer.Option(min=1, help="Replay at most this many requests.")] = None,
    costs: Annotated[str | None, typer.Option(help="A JSON file with rates that replace the defaults.")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")] = None,
) -> None:
    """Estimate the lengths of a trace's answers online, and say what share of pairs is ranked rightly."""
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        requests_read = read_trace(trace, requests)
        rates = Costs.from_file(costs) if costs else Costs()
    except (TraceError, CostsError) as error:
        err.print(str(error), markup=False)
        raise typer.Exit(EXIT_INPUT) from None
    found = replay(requests_read, rates, nodes)
    try:
        if json_file != "-":
            print(table(found))
        text = json.dumps({"trace": trace, **found}, indent=2)
        if json_file == "-":
            sys.stdout.write(text + "\n")
        elif json_file:
            Path(json_file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        err.print(f"{error.filename} cannot be written ({error.strerror}).", markup=False)
        raise typer.Exit(EXIT_FAILED) from None


if __name__ == "__main__":
    typer.run(main)
