"""`python -m kvmanager.simulator.next_turns`: the share of next turns whose KV is on the device; docs/speculation.md.

Replays a trace's conversations (`kvmanager.simulator.turn_replay`) with and without speculation, over both orders in
which devices evict: least recently used first (``lru``, vLLM's own), and coldest first (``hotness``, the server's).

Exit codes: 0 done, 1 a replay broke off or the result could not be written, 2 a word of the command cannot be used.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from kvmanager.simulator.costs import Costs, CostsError
from kvmanager.simulator.trace import BLOCK_TOKENS, TraceError, TraceRequest, read_trace
from kvmanager.simulator.turn_replay import PIN_SHARE, Turn, TurnReplay, find_turns
from kvmanager.speculation_orders import SpeculationSetting

EXIT_FAILED, EXIT_INPUT = 1, 2
COLUMNS = (
    "| arm | next turns found on the device | their tokens found | TTFT mean | p50 | p90 | promoted | used | wasted |"
)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run the devices."""

    name: str
    by_hotness: bool
    speculative: bool


ARMS = (
    Arm("none", by_hotness=False, speculative=False),
    Arm("keep by hotness", by_hotness=True, speculative=False),
    Arm("speculative", by_hotness=False, speculative=True),
    Arm("hotness + speculative", by_hotness=True, speculative=True),
)


def replay_arm(
    arm: Arm,
    trace: Sequence[TraceRequest],
    replicas: int,
    device_blocks: int,
    budget_share: float,
    costs: Costs,
    setting: SpeculationSetting,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Replay one arm; return its figures, TTFT in seconds. Raises ValueError for a request that fits no device."""
    began = time.perf_counter()
    turns = find_turns(trace)
    replay = TurnReplay(
        replicas, device_blocks, costs, arm.by_hotness, setting if arm.speculative else None, budget_share
    )
    bar = progress.add_task(arm.name, total=len(turns)) if progress else None
    replay.run(turns, lambda: progress.advance(bar) if progress and bar is not None else None)
    return {
        "arm": arm.name,
        **asdict(arm),
        "replicas": replicas,
        "device_blocks": device_blocks,
        "budget_share": budget_share if arm.speculative else None,
        "requests": len(turns),
        **_figures([turn for turn in turns if turn.previous is not None]),
        "promoted_tokens": replay.promoted_blocks * BLOCK_TOKENS,
        "speculation": replay.speculator.stats() if replay.speculator else None,
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
    lines = [COLUMNS, "|---" + "|---:" * 8 + "|"]
    for row in rows:
        ttft = [f"{row['ttft_s'][name] * 1e3:.0f} ms" if row["next_turns"] else "" for name in ("mean", "p50", "p90")]
        books = row["speculation"]
        counts = [str(books[name]) for name in ("promoted", "used", "wasted")] if books else ["", "", ""]
        found = f"**{row['found_share']:.3f}** | {row['found_token_share']:.3f}"
        lines.append(f"| {row['arm']} | {found} | {' | '.join(ttft + counts)} |")
    return "\n".join(lines)


def main(
    trace: Annotated[str, typer.Option(help="A trace in Mooncake's format, JSON lines.")],
    replicas: Annotated[int, typer.Option(min=1, max=10_000)] = 8,
    device_blocks: Annotated[int, typer.Option(min=2, help="Blocks of 512 tokens of each replica's device.")] = 1000,
    budget_share: Annotated[
        float, typer.Option(min=0.0, max=PIN_SHARE, help="Share of each device that speculation may fill.")
    ] = 0.4,
    window_share: Annotated[
        float, typer.Option(min=0.0, help="How far ahead speculation looks, of the median think time.")
    ] = 0.5,
    requests: Annotated[int | None, typer.Option(min=1, help="Replay only so many requests.")] = None,
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
    setting = SpeculationSetting(
        window_share=window_share, load_bytes_per_s=rates.cpu_bytes_per_s, move_bytes_per_s=rates.cpu_bytes_per_s / 4
    )
    try:
        with Progress(console=err, transient=True) as progress:
            rows = [
                replay_arm(arm, requests_read, replicas, device_blocks, budget_share, rates, setting, progress)
                for arm in ARMS
            ]
        if json_file != "-":
            print(table(rows))
        text = json.dumps([{**row, "setting": asdict(setting), "trace": trace} for row in rows], indent=2)
        if json_file == "-":
            sys.stdout.write(text + "\n")
        elif json_file:
            Path(json_file).write_text(text)
    except ValueError as error:
        err.print(f"{error}.", markup=False)
        raise typer.Exit(EXIT_FAILED) from None
    except OSError as error:
        err.print(f"{error.filename} cannot be written ({error.strerror}).", markup=False)
        raise typer.Exit(EXIT_FAILED) from None


if __name__ == "__main__":
    typer.run(main)
