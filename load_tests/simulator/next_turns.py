"""`python -m load_tests.simulator.next_turns`: next turns whose KV is on the device; docs/measured/eviction.md.

Replays a trace's conversations (`load_tests.simulator.turn_replay`) with each value of `kv.device_policy`: devices
evict what was used least recently (``lru``, vLLM's own order), or by rank (``hotness``).

Exit codes: 0 done, 1 a replay broke off or the result could not be written, 2 a word of the command cannot be used.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from load_tests.simulator.costs import Costs, CostsError
from load_tests.simulator.trace import TraceError, TraceRequest, read_trace
from load_tests.simulator.turn_replay import Turn, TurnReplay, find_turns

EXIT_FAILED, EXIT_INPUT = 1, 2
COLUMNS = "| `kv.device_policy` | next turns found on the device | their tokens found | TTFT mean | p50 | p90 |"
ARMS = ("lru", "hotness")


def replay_arm(
    arm: str,
    trace: Sequence[TraceRequest],
    replicas: int,
    device_blocks: int,
    costs: Costs,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Replay one arm; return its figures, TTFT in seconds. Raises ValueError for a request that fits no device."""
    began = time.perf_counter()
    turns = find_turns(trace)
    replay = TurnReplay(replicas, device_blocks, costs, by_hotness=arm == "hotness")
    bar = progress.add_task(arm, total=len(turns)) if progress else None
    replay.run(turns, lambda: progress.advance(bar) if progress and bar is not None else None)
    return {
        "device_policy": arm,
        "replicas": replicas,
        "device_blocks": device_blocks,
        "requests": len(turns),
        **_figures([turn for turn in turns if turn.previous is not None]),
        "seconds": round(time.perf_counter() - began, 1),
    }


def _figures(next_turns: Sequence[Turn]) -> dict[str, Any]:
    if not next_turns:
        return {
            "next_turns": 0,
            "found_share": 0.0,
            "found_token_share": 0.0,
            "ttft_s": dict.fromkeys(("mean", "p50", "p90")),
        }
    waits = sorted(turn.ttft_s for turn in next_turns)
    known = sum(turn.known_blocks for turn in next_turns)
    return {
        "next_turns": len(next_turns),
        "found_share": sum(turn.found_blocks == turn.known_blocks for turn in next_turns) / len(next_turns),
        "found_token_share": sum(turn.found_blocks for turn in next_turns) / max(1, known),
        "ttft_s": {
            "mean": statistics.fmean(waits),
            "p50": waits[len(waits) // 2],
            "p90": waits[len(waits) * 9 // 10],
        },
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [COLUMNS, "|---" + "|---:" * 5 + "|"]
    for row in rows:
        ttft = [f"{row['ttft_s'][name] * 1e3:.0f} ms" if row["next_turns"] else "" for name in ("mean", "p50", "p90")]
        found = f"**{row['found_share']:.3f}** | {row['found_token_share']:.3f}"
        lines.append(f"| {row['device_policy']} | {found} | {' | '.join(ttft)} |")
    return "\n".join(lines)


def main(
    trace: Annotated[str, typer.Option(help="A trace in Mooncake's format, JSON lines.")],
    replicas: Annotated[int, typer.Option(min=1, max=10_000)] = 8,
    device_blocks: Annotated[int, typer.Option(min=2, help="Blocks of 512 tokens of each replica's device.")] = 1000,
    requests: Annotated[int | None, typer.Option(min=1, help="Replay at most this many requests.")] = None,
    costs: Annotated[str | None, typer.Option(help="A JSON file with rates that replace the defaults.")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")] = None,
) -> None:
    """Replay conversations and say what share of next turns find their KV on the device of their replica."""
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        requests_read = read_trace(trace, requests)
        rates = Costs.from_file(costs) if costs else Costs()
    except (TraceError, CostsError) as error:
        err.print(str(error), markup=False)
        raise typer.Exit(EXIT_INPUT) from None
    try:
        with Progress(console=err, transient=True) as progress:
            rows = [replay_arm(arm, requests_read, replicas, device_blocks, rates, progress) for arm in ARMS]
        if json_file != "-":
            print(table(rows))
        text = json.dumps([{**row, "trace": trace} for row in rows], indent=2)
        if json_file == "-":
            sys.stdout.write(text + "\n")
        elif json_file:
            Path(json_file).write_text(text, encoding="utf-8")
    except ValueError as error:
        err.print(f"{error}.", markup=False)
        raise typer.Exit(EXIT_FAILED) from None
    except OSError as error:
        err.print(f"{error.filename} cannot be written ({error.strerror}).", markup=False)
        raise typer.Exit(EXIT_FAILED) from None


if __name__ == "__main__":
    typer.run(main)
