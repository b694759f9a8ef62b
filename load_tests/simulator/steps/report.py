"""The arms' figures as a Markdown table, alone or in a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from load_tests.simulator.steps.machines import Machine
from load_tests.simulator.steps.roles import Row

BEGIN, END = "<!-- roles: written by python -m load_tests.simulator roles --write-docs -->", "<!-- end of roles -->"
_HEAD = "| replicas | TTFT p50 / p99, s | TPOT p50 / p99, ms | longest gap, p99, ms | mean completion, s | in SLO |"


def table(machine: Machine, rows: Sequence[Row], seed: int) -> str:
    """One machine's arms, with what was assumed below them."""
    lines = [f"**{machine.name}, {rows[0].rate:g} requests a second**", "", _HEAD, "|---" + "|---:" * 5 + "|"]
    for row in rows:
        cells = [
            row.arm,
            f"{row.ttft_p50_s:.2f} / {row.ttft_p99_s:.2f}",
            f"{1e3 * row.tpot_p50_s:.0f} / {1e3 * row.tpot_p99_s:.0f}",
            f"{1e3 * row.worst_gap_p99_s:.0f}",
            f"{row.mean_completion_s:.2f}",
            f"{100 * row.in_slo:.0f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    cost, prompt, answer = machine.engine.cost, machine.prompt, machine.answer
    handover = machine.handover.seconds(prompt.median)
    lines += [
        "",
        f"*{rows[0].jobs:,} requests, seed {seed}. Log-normal lengths: prompts of {prompt.median:,} tokens in the",
        f"median (sigma {prompt.sigma}), answers of {answer.median} ({answer.sigma}).",
        f"A step takes {1e3 * cost.base_s:g} ms, {1e3 * cost.decode_s:g} ms a decode, {1e3 * cost.prefill_s:g} ms a",
        f"prefill token and {1e9 * cost.context_s:g} ns a token of the decodes' context. It has",
        f"{machine.engine.step_tokens:,} tokens at most.",
        f"A hand-over takes {1e3 * handover:.0f} ms at the median prompt. SLO: TTFT {machine.slo_ttft_s:g} s and TPOT",
        f"{1e3 * machine.slo_tpot_s:g} ms. {machine.said}.*",
    ]
    return "\n".join(lines)


def write_between(page: Path, text: str) -> None:
    """Replace what stands between the page's marks. Raises ValueError where it has none, OSError as writing does."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
