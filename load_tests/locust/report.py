"""A load test's summary (load_tests.locust.summary) for people: a table, and one sentence with an exit code."""

from __future__ import annotations

from typing import Any

from load_tests.measuring import report
from load_tests.measuring.program import EXIT_FELL_SHORT, EXIT_STOPPED
from load_tests.measuring.spread import number

MOST_ERRORS = 5
HEADER = (
    "users", "requests", "failed", "429", "TTFT p50 / p95 ms", "returning: TTFT p50 / p95 ms", "TPOT p50 / p95 ms",
    "output tokens/s", "cached",
)  # fmt: skip


def table(summary: dict[str, Any]) -> str:
    """Markdown: a row for each class and one for all, then the most frequent errors."""
    rows = {**summary["classes"], "all": summary["all"]}
    lines = [report.table(HEADER, (_row(name, figures) for name, figures in rows.items()))]
    errors = list(summary["errors"].items())
    if errors:
        lines += ["", *(f"{count} failed: {message}" for message, count in errors[:MOST_ERRORS])]
    if len(errors) > MOST_ERRORS:
        lines.append(f"{sum(count for _, count in errors[MOST_ERRORS:])} failed in other ways; see the results.")
    return "\n".join(lines)


def conclusion(summary: dict[str, Any], max_error_rate: float, interrupted: bool) -> tuple[str, int]:
    """One sentence, and the exit code. `max_error_rate` is a share of the requests, without those turned away."""
    every = summary["all"]
    requests, failures = every["requests"], every["failures"]
    counted = f"{requests} requests in {summary['seconds']:.0f} s"
    if interrupted:
        return f"Interrupted: {counted}, {failures} failed; the figures above are of these.", EXIT_STOPPED
    if requests == failures:
        return (
            f"No answer in {summary['seconds']:.0f} s: {failures} failed, {every['turned_away']} 429.",
            EXIT_FELL_SHORT,
        )
    rate = failures / requests
    if rate > max_error_rate:
        return f"{counted}, and {rate:.1%} failed; --max-error-rate allows {max_error_rate:.1%}.", EXIT_FELL_SHORT
    return f"{counted}, {failures} failed ({rate:.1%}).", 0


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    return [
        name,
        *(str(figures[count]) for count in ("requests", "failures", "turned_away")),
        *(_milliseconds(figures[times]) for times in ("ttft_s", "ttft_returning_s", "tpot_s")),
        f"{figures['output_tokens_per_s'] or 0:.0f}",
        "-" if figures["cached_share"] is None else f"{figures['cached_share']:.0%}",
    ]


def _milliseconds(times: dict[str, float] | None) -> str:
    return "-" if times is None else f"{number(1e3 * times['p50'])} / {number(1e3 * times['p95'])}"
