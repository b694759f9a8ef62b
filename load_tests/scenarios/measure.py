"""One arm's round on a server that runs: empty tiers, a workload, and what it left in the tiers."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from load_tests.harness.client import Measured, errors_by_text, run_workload
from load_tests.harness.running_server import RunningServer, ServerError
from load_tests.scenarios.uses import Use
from load_tests.workloads.workload import Workload

IDLE_S = 60.0
SETTLED_S, SETTLE_S = 1.5, 30.0
"""Tiers whose segments have not changed for so long are settled; the longest wait for that."""
TIERS = ("cpu", "redis")


@dataclass(frozen=True)
class Round:
    """Means and sums of one round: seconds to first tokens of judged requests, bytes in the tiers behind the workload.

    `reused`: the part of judged prompts whose KV was not computed. `answers`: of all requests, by number.
    """

    ttft_s: float
    tokens_per_s: float
    tier_bytes: Mapping[str, float]
    prompt_tokens: int
    reused: float
    answers: Mapping[int, str] = field(repr=False)

    @property
    def bytes_per_token(self) -> float:
        """Of the workload's prompts: both tiers'."""
        return sum(self.tier_bytes.values()) / self.prompt_tokens


def one_round(server: RunningServer, model: str, workload: Workload, use: Use, body: Mapping[str, Any]) -> Round:
    """Raises ServerError where a request fails."""
    server.wait_until_idle(IDLE_S)
    server.clear("device", *TIERS)
    answers: dict[int, str] = {}
    measured = _sent(server, model, workload, body, answers)
    tokens_per_s = throughput(measured)
    tier_bytes = _settled_bytes(server)
    judged = [one for one in measured if use.judges_all or one.returning]
    if use.cools:
        server.clear("device", "cpu")
        server.wait_until_idle(IDLE_S)
        again: dict[int, str] = {}
        judged = _sent(server, model, firsts(workload), body, again)
        answers |= {len(workload.requests) + number: text for number, text in again.items()}
    return Round(
        ttft_s=statistics.fmean(one.ttft_s or 0.0 for one in judged),
        tokens_per_s=tokens_per_s,
        tier_bytes=tier_bytes,
        prompt_tokens=sum(one.prompt_tokens for one in measured),
        reused=reused_share(judged),
        answers=answers,
    )


def firsts(workload: Workload) -> Workload:
    """Each session's first request, one after the other."""
    requests = [request for request in workload.requests if request.after is None]
    numbered = tuple(replace(request, number=number) for number, request in enumerate(requests))
    return replace(workload, requests=numbered, concurrency=1)


def throughput(measured: Sequence[Measured]) -> float:
    """Answers' tokens a second, from the first request to the last answer."""
    span = max(one.ended_s for one in measured) - min(one.sent_s for one in measured)
    return sum(one.output_tokens for one in measured) / span


def reused_share(measured: Sequence[Measured]) -> float:
    """The part of their prompts' tokens whose KV was not computed."""
    computed = sum((one.kv_cache or {}).get("recomputed", 0) for one in measured)
    return 1 - computed / sum(one.prompt_tokens for one in measured)


def _sent(
    server: RunningServer, model: str, workload: Workload, body: Mapping[str, Any], answers: dict[int, str]
) -> list[Measured]:
    measured = asyncio.run(run_workload(server.url, model, workload, extra_body=body, answers=answers))
    if failed := errors_by_text(measured):
        raise ServerError(f"requests failed: {failed}")
    return measured


def _settled_bytes(server: RunningServer) -> dict[str, float]:
    """Bytes by tier, when no copy has changed them for a while."""
    server.wait_until_idle(IDLE_S)
    found, since, end = _tier_bytes(server), time.monotonic(), time.monotonic() + SETTLE_S
    while time.monotonic() < min(since + SETTLED_S, end):
        time.sleep(0.3)
        if (now := _tier_bytes(server)) != found:
            found, since = now, time.monotonic()
    return found


def _tier_bytes(server: RunningServer) -> dict[str, float]:
    found = dict.fromkeys(TIERS, 0.0)
    samples = server.metrics()
    for tier in TIERS:
        with contextlib.suppress(KeyError):
            found[tier] = sum(
                value for name, labels, value in samples if name == "crosskv_tier_bytes" and labels["tier"] == tier
            )
    return found
