"""Every arm in turn on the same machine: start, warm up, send each workload, measure, end.

An alternation gives each arm a fresh server and the same requests; the arms' order rotates from one alternation to the
next, and so do the texts.
"""

from __future__ import annotations

import asyncio
import functools
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.launch.ports import free_port
from load_tests.bench.arms import ARMS, BLENDED, Arm
from load_tests.bench.balance import added, by_usage, settled, variation
from load_tests.bench.cases import Case, make_cases
from load_tests.bench.figures import Figures, figures, in_words
from load_tests.bench.plan import Key, Plan
from load_tests.harness.client import Measured, ServerError, run_workload
from load_tests.harness.footprint import keeping_cpu_s
from load_tests.harness.models import model_folder, token_counter
from load_tests.harness.server import ServerProcess, answering, local_http, running
from load_tests.measuring.journal import Journal
from load_tests.measuring.processes import CPUMeter, pss_bytes, wait_until_quiet
from load_tests.measuring.turns import rotated
from load_tests.peers.engine import Peer
from load_tests.workloads import Words, Workload, long_document_qa

REST_S = 2.0
"""After a workload, before its CPU seconds are read: what a server does for it after the last answer counts too."""
_WARM_UP_DOCUMENTS, _WARM_UP_TOKENS = 4, 300
CHUNK_TOKENS = "crosskv_chunk_tokens_total"


@dataclass(frozen=True)
class Watch:
    """Callbacks for what happens: what is under way, each request's end, and what a measurement came to."""

    now: Callable[[str], None]
    done: Callable[[Measured], None]
    measured: Callable[[str], None]


def measure(plan: Plan, journal: Journal[Key], logs: Path, port: int | None, start_s: float, watch: Watch) -> None:
    """Measure what the journal lacks. `port` None: a free one for each server.

    Raises ServerError when a server does not start or ends by itself; what was measured before is kept.
    """
    missing = set(journal.missing(plan.keys()))
    for model, alternation in ((model, number) for model in plan.models for number in range(plan.alternations)):
        if not any((key.model, key.alternation) == (model, alternation) for key in missing):
            continue
        cases = cases_of(plan, model, alternation)
        for arm in rotated(plan.arms, alternation):
            keys = {Key(model, alternation, arm, case.workload.name, case.working_set): case for case in cases}
            wanted = {key: case for key, case in keys.items() if key in missing}  # those that the arm takes
            if wanted:
                title = f"{model}, alternation {alternation + 1} of {plan.alternations}, {arm}"
                _one_server(plan, ARMS[arm], wanted, journal, logs, port or free_port(), start_s, title, watch)


@functools.cache
def cases_of(plan: Plan, model: str, alternation: int) -> list[Case]:
    """The requests of one alternation, equal for all arms."""
    folder = model_folder(model)
    return make_cases(plan, model, Words(token_counter(folder)), f"{plan.sizes.seed}/{model}/{alternation}")


def requests_to_come(plan: Plan, journal: Journal[Key]) -> int:
    """Requests of all measurements that the journal lacks."""
    missing = sorted(journal.missing(plan.keys()))
    total = 0
    for (model, alternation), keys in groupby(missing, key=lambda key: (key.model, key.alternation)):
        sizes = {
            (case.workload.name, case.working_set): len(case.workload.requests)
            for case in cases_of(plan, model, alternation)
        }
        total += sum(sizes[key.workload, key.working_set] for key in keys)
    return total


def _one_server(
    plan: Plan,
    arm: Arm,
    wanted: dict[Key, Case],
    journal: Journal[Key],
    logs: Path,
    port: int,
    start_s: float,
    title: str,
    watch: Watch,
) -> None:
    sizes = plan.sizes
    key = next(iter(wanted))
    folder = model_folder(key.model)
    peer = Peer(str(folder), port, sizes.replicas, sizes.device_blocks, sizes.max_model_len, sizes.dtype)
    log = logs / f"{key.model}-{key.alternation}-{arm.name}.log"
    with tempfile.TemporaryDirectory(prefix="crosskv-bench-") as scratch:
        metrics_port = free_port()
        command = arm.command(peer, Path(scratch), metrics_port)
        watch.now(f"{title}: starting")
        url = f"http://127.0.0.1:{port}"
        with running(command, url, answering(url, folder.name), log, start_s) as server:
            watch.now(f"{title}: warming up")
            warm_up = _warm_up(folder)
            _send(server, folder.name, warm_up, arm.body, None)
            counts = None if arm.is_crosskv else settled(metrics_port, len(warm_up.requests) + 1)
            for key, case in wanted.items():
                watch.now(f"{title}: waiting until the server rests")
                if not wait_until_quiet(server.process):
                    watch.measured(f"{title}: measured although the server had not come to rest")
                watch.now(f"{title}: {key.workload}, {key.working_set:g} x the device pools")
                kept_s = keeping_cpu_s(server.process)
                chunks = chunk_tokens(server.url) if arm.name == BLENDED else {}
                found, cpu_s, pss = _send_measured(server, folder.name, case.workload, arm.body, watch)
                kept_s = keeping_cpu_s(server.process) - kept_s
                if arm.is_crosskv:
                    spread: dict[str, int] | None = by_usage(found)
                else:
                    before = counts
                    counts = settled(metrics_port, sum((before or {}).values()) + len(found))
                    spread = added(before, counts, len(found))
                result = figures(found, variation(spread, sizes.replicas), cpu_s, pss)
                result |= {"keeping_cpu_s": kept_s} if arm.is_crosskv else {}
                if arm.name == BLENDED:
                    result["blend_hit_rate"] = hit_rate(chunks, chunk_tokens(server.url))
                _require_answers(result, server, title)
                journal.add(key, figures=result, requests=[asdict(one) for one in found])
                watch.measured(f"{title}: {key.workload}, {key.working_set:g} x: {in_words(result)}")


def _send_measured(
    server: ServerProcess, model: str, workload: Workload, body: Mapping[str, Any], watch: Watch
) -> tuple[list[Measured], float, int]:
    meter = CPUMeter(server.process)
    found = _send(server, model, workload, body, watch)
    time.sleep(REST_S)
    return found, meter.seconds(), pss_bytes(server.process)


def _send(
    server: ServerProcess, model: str, workload: Workload, body: Mapping[str, Any], watch: Watch | None
) -> list[Measured]:
    return asyncio.run(run_workload(server.url, model, workload, watch.done if watch else None, extra_body=body))


def _warm_up(folder: Path) -> Workload:
    """Prompts on all replicas, cold and returning ones: what is made at first use is there before anything counts."""
    return long_document_qa(
        random.Random("warm-up"),
        Words(token_counter(folder)),
        documents=_WARM_UP_DOCUMENTS,
        document_tokens=_WARM_UP_TOKENS,
        answer_tokens=4,
        repeats=1,
        concurrency=_WARM_UP_DOCUMENTS,
    )


def _require_answers(result: Figures, server: ServerProcess, title: str) -> None:
    """A server that answered nothing has failed; some errors are a result."""
    if result["errors"] == result["requests"]:
        raise ServerError(f"{title}: every request failed ({result['error']}).\n{server.last_lines()}")
    if not server.process.is_running():
        raise ServerError(f"{title}: the server ended by itself.\n{server.last_lines()}")


def chunk_tokens(url: str) -> dict[str, float]:
    """Tokens that a crosskv server has `asked` for in chunks of blended prompts, and `found`; empty: it does not say.

    `found` are those that were stored when the prompt was planned: with `blending.fill: first`, after its unknown
    chunks were computed.
    """
    try:
        text = local_http().get(f"{url}/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (httpx.HTTPError, ValueError):
        return {}
    return {sample.labels.get("outcome", ""): sample.value for sample in samples if sample.name == CHUNK_TOKENS}


def hit_rate(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Chunk tokens found over those asked for between two counts; None where there were none, or a count is missing."""
    if not all(outcome in counts for counts in (before, after) for outcome in ("asked", "found")):
        return None
    asked, found = (after[outcome] - before[outcome] for outcome in ("asked", "found"))
    return found / asked if asked else None
