"""What a running server takes, by kind of process: proportional set size (PSS) and processor time since the start.

It is `make serve` and all processes below it. PSS counts a page that several processes share once, a part for each.

python -m load_tests.harness.footprint --port 8000
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import psutil
import typer

from load_tests.measuring import report
from load_tests.measuring.processes import ProcessUse, use_by_process
from load_tests.measuring.program import JsonFile, one_sentence

MIB = 1024**2

KINDS: dict[str, tuple[str, ...]] = {
    "launcher": ("-m app.launch",),
    "ingress": ("ray::ServeReplica:crosskv:Ingress",),
    "constraint process": ("app.openai.constraint_worker",),
    "replica": ("ray::ServeReplica:crosskv:Replica", "VLLM::EngineCore"),
    "manager": ("ray::KVManagerActor",),
    "CPU tier": ("ray::CPUTier",),
    "prefetch worker": ("ray::PrefetchWorker",),
    "Redis tier": ("ray::RedisTier",),
    "Redis": ("redis-server",),
    "HAProxy": ("/haproxy ", "ray::HAProxyManager"),
    "Ray Serve": ("ray::ServeController", "ray::ProxyActor"),
    "Ray's daemons": (
        "/ray/core/",
        "/ray/dashboard/",
        "/ray/_private/",
        "/ray/autoscaler/",
        "ray::DashboardAgent",
        "ray::RuntimeEnvAgent",
    ),
    "Ray's idle workers": ("ray::IDLE",),
}
"""By kind: a part of the command lines of its processes. The first kind that fits counts."""
OTHER = "other"
KEEPERS = frozenset({"manager", "CPU tier", "prefetch worker", "Redis tier", "Redis"})
"""Kinds of processes that keep KV outside the engines."""


@dataclass(slots=True)
class KindUse:
    """What the processes of one kind take together, and the largest of them."""

    processes: int = 0
    pss_bytes: int = 0
    most_pss_bytes: int = 0
    cpu_s: float = 0.0

    def add(self, use: ProcessUse) -> None:
        """Count one more process."""
        self.processes += 1
        self.pss_bytes += use.pss_bytes
        self.most_pss_bytes = max(self.most_pss_bytes, use.pss_bytes)
        self.cpu_s += use.cpu_s


def kind_of(command: str) -> str:
    """The kind of a process, by its command line."""
    return next((kind for kind, parts in KINDS.items() if any(part in command for part in parts)), OTHER)


def by_kind(uses: Iterable[ProcessUse]) -> dict[str, KindUse]:
    """What each kind takes, the largest first."""
    found: defaultdict[str, KindUse] = defaultdict(KindUse)
    for use in uses:
        found[kind_of(use.command)].add(use)
    return dict(sorted(found.items(), key=lambda item: -item[1].pss_bytes))


def keeping_cpu_s(top: psutil.Process) -> float:
    """Processor time of `KEEPERS` below a process, since their start."""
    return sum(use.cpu_s for kind, use in by_kind(use_by_process(top)).items() if kind in KEEPERS)


def launcher_of(port: int) -> psutil.Process:
    """The `app.launch` process whose server listens on `port`. Raises LookupError."""
    for connection in psutil.net_connections("tcp"):
        listening = connection.status == psutil.CONN_LISTEN and bool(connection.laddr)
        if listening and connection.laddr.port == port and connection.pid:  # type: ignore[union-attr]
            ancestors = psutil.Process(connection.pid).parents()
            launchers: list[psutil.Process] = [process for process in ancestors if "app.launch" in process.cmdline()]
            if launchers:
                return launchers[-1]
    raise LookupError(f"no server that `make serve` started listens on port {port}")


def table(found: dict[str, KindUse], total: KindUse) -> str:
    """Markdown: a line for each kind, and the sum."""
    head = ["kind", "processes", "PSS, MiB", "largest, MiB", "CPU, s"]
    body = [
        [kind, str(use.processes), str(use.pss_bytes // MIB), str(use.most_pss_bytes // MIB), f"{use.cpu_s:.1f}"]
        for kind, use in [*found.items(), ("all", total)]
    ]
    return report.table(head, body)


def main(port: int = 8000, json_file: JsonFile = None) -> None:
    """Print the table and the sum."""
    with one_sentence(LookupError):
        uses = use_by_process(launcher_of(port))
    found, total = by_kind(uses), KindUse()
    for use in uses:
        total.add(use)
    kinds = {kind: asdict(use) for kind, use in found.items()}
    report.deliver(table(found, total), {**asdict(total), "kinds": kinds}, json_file)


if __name__ == "__main__":
    typer.run(main)
