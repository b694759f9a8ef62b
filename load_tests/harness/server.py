"""Servers as processes, started and ended; and crosskv's as those see it that measure or disturb it: over HTTP too."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.launch.cluster import ON_NETWORK, TOKEN_FILE
from app.launch.descendants import Descendants
from app.launch.ports import free_port
from app.launch.run_folder import run_folder
from configs.model_folder import PROJECT_ROOT
from load_tests.harness.client import ServerError
from load_tests.harness.patience import Clock, patience, until

# A cold disk and busy neighbours have made it 177 s: a server that fails ends by itself, and is not waited for.
START_S = 600.0
PARTS_MISSED = "crosskv_metrics_sources_missing_total"
MOST_SCRAPES = 3
READY_POLL_S = 0.5
STOP_S = 75.0
COMES_BACK_S = 90.0
"""A replica, or a lease of a lost answer, at most."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
MOST_SAID = 4000
"""Characters."""
_LAST_LINES = 20

T = TypeVar("T")


@dataclass(frozen=True)
class ServerProcess:
    """`process` is what was started; everything of the server is that or below it."""

    url: str
    process: psutil.Process
    log: Path
    logs_of_its_own: tuple[Path, ...] = ()
    """Other logs that it writes, where they exist."""
    left_behind: list[psutil.Process] = field(default_factory=list)
    """Processes that outlived it, and were ended then."""

    def last_lines(self) -> str:
        """The end of what it printed and wrote, and where all of that lies."""
        said: list[str] = []
        for path in (path for path in (self.log, *self.logs_of_its_own) if path.exists()):
            text = path.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines() if line.strip()]
            said += [*lines[-_LAST_LINES:], f"The whole story: {path}"]
        return "\n".join(said)


@contextlib.contextmanager
def running(
    command: Sequence[str],
    url: str,
    ready: Callable[[], bool],
    log: Path,
    start_s: float,
    logs_of_its_own: tuple[Path, ...] = (),
) -> Iterator[ServerProcess]:
    """Start `command`, and end it on leaving, as Ctrl-C does. What it prints goes to `log`.

    `ready` is asked until it holds; an HTTP error and a ServerError of it count as "not yet". Raises ServerError, with
    the end of the log, when the server ends by itself or is not ready within `start_s` seconds.
    """
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(
            list(command),
            cwd=PROJECT_ROOT,
            env=os.environ | {"RAY_worker_register_timeout_seconds": str(int(start_s))},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            process_group=0,  # a terminal's Ctrl-C reaches the program only, which then ends the server
        )
    server = ServerProcess(url, psutil.Process(child.pid), log, logs_of_its_own)
    below = Descendants(server.process)
    try:
        _wait_until_ready(child, server, ready, start_s)
        yield server
    finally:
        below.note()
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience(STOP_S))
        server.left_behind.extend(below.living())
        below.end(threading.Event())
        if child.poll() is None:
            server.left_behind.append(server.process)
            child.kill()
        child.wait()


def _wait_until_ready(
    child: subprocess.Popen[bytes], server: ServerProcess, ready: Callable[[], bool], start_s: float
) -> None:
    deadline = time.monotonic() + start_s
    while True:
        with contextlib.suppress(httpx.HTTPError, ValueError, ServerError):
            if ready():
                return
        if child.poll() is not None:
            raise ServerError(
                f"The server ended with code {child.returncode} before it was ready:\n{server.last_lines()}"
            )
        if time.monotonic() > deadline:
            raise ServerError(f"The server was not ready after {start_s:g} s:\n{server.last_lines()}")
        time.sleep(READY_POLL_S)


def answering(url: str, model: str) -> Callable[[], bool]:
    """Return a condition for `running`: the server has answered a first prompt."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    client = httpx.Client(timeout=60, trust_env=False)  # one for all: making one takes as long as many a prompt
    # Serve's proxy answers 404 before the application is there, and 503 before a replica is.
    return lambda: client.post(f"{url}/v1/chat/completions", json=body).status_code == 200


def write_config(folder: Path, settings: Mapping[str, Any], merged: Sequence[str], port: int | None = None) -> Path:
    """Write `serve_config.yaml` with these settings, and port, over the shipped ones, and return where.

    Of the sections in `merged` the shipped values stay where none is given; another section is replaced whole.
    """
    config = yaml.safe_load((PROJECT_ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    shipped = config["applications"][0]["args"]
    parts = {name: {**shipped[name], **settings.get(name, {})} for name in merged}
    config["applications"][0]["args"] = {**shipped, **settings, **parts}
    config["http_options"]["port"] = port or config["http_options"]["port"]
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def launch_command(config: Path, port: int) -> list[str]:
    """Return the command that starts crosskv as `make serve` does."""
    return [sys.executable, "-m", "app.launch", str(config), "--port", str(port)]


def local_http(key: str | None = None) -> httpx.Client:
    """For all the asking on this machine, with a key where the server wants one.

    `httpx.get` makes a client for each question, which reads all certificates of the world first. Each question has a
    connection of its own nevertheless: the server that is asked may be another process by then. No proxy of the
    environment is for this machine's own address. Figures are of now: what is compared may not be a second old.
    """
    headers = {"Cache-Control": "no-cache", **({"Authorization": f"Bearer {key}"} if key else {})}
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(timeout=patience(10), limits=limits, headers=headers, trust_env=False)


def health_of(http: httpx.Client, url: str) -> dict[str, Any]:
    """GET /health. Raises ServerError while there is no ingress, for which HAProxy answers."""
    answer: dict[str, Any] = http.get(f"{url}/health").json()
    if "status" not in answer:
        raise ServerError(f"no ingress answers: {answer}")
    return answer


@dataclass(frozen=True)
class RunningServer:
    """`launcher` is `make serve`'s process, `model_folder` what it serves, `log` what it printed."""

    url: str
    port: int
    model_folder: Path
    launcher: psutil.Process
    log: Path
    http: httpx.Client = field(default_factory=local_http)
    clock: Clock = time
    _parts_missed: list[str] = field(default_factory=list, repr=False)
    """The samples, as they were last read, of how often a part gave no metrics."""

    def said(self) -> str:
        """The last of what the launcher printed, and of the server's own log."""
        parts = (self.log, run_folder(self.port) / "server.log")
        return "\n".join(f"{path}:\n{path.read_text(encoding='utf-8')[-MOST_SAID:]}" for path in parts if path.exists())

    def metrics_page(self) -> str:
        """GET /metrics. An answer leaves out a part that is late: it is asked again, but as it may be gone, twice."""
        for _ in range(MOST_SCRAPES):
            text = self.http.get(f"{self.url}/metrics").text
            missed = [line for line in text.splitlines() if line.startswith(PARTS_MISSED)]
            if missed == self._parts_missed:
                break
            self._parts_missed[:] = missed
        return text

    def metrics(self, *names: str) -> list[tuple[str, dict[str, str], float]]:
        """The samples of GET /metrics whose names begin with one of `names`, or all of them."""
        text = self.metrics_page()
        if names:
            text = "".join(line for line in text.splitlines(keepends=True) if line.startswith(names))
        families = text_string_to_metric_families(text)
        return [(sample.name, dict(sample.labels), sample.value) for family in families for sample in family.samples]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels. Raises ServerError when there is none."""
        values = [value for found, has, value in self.metrics(name) if found == name and labels.items() <= has.items()]
        if not values:
            raise ServerError(f"{name} {labels} is not in /metrics")
        return sum(values)

    def segments(self, tier: str) -> float:
        """How many lie in `cpu` or `redis`, of all nodes."""
        return self.metric("crosskv_tier_segments", tier=tier)

    def health(self) -> dict[str, Any]:
        """GET /health. Raises ServerError while there is no ingress, for which HAProxy answers."""
        return health_of(self.http, self.url)

    def part(self, name: str) -> dict[str, Any]:
        """What /health says of a part. Raises ServerError while it does not name it, as before the manager answers."""
        parts = self.health()["parts"]
        if name not in parts:
            raise ServerError(f"/health does not name {name}: {parts}")
        part: dict[str, Any] = parts[name]
        return part

    def stats(self) -> dict[str, Any]:
        """GET /api/v1/kv/stats."""
        answer: dict[str, Any] = self.http.get(f"{self.url}/api/v1/kv/stats").raise_for_status().json()
        return answer

    def lookup(self, tokens: list[int]) -> dict[str, Any]:
        """Where the KV of these tokens lies."""
        listed = ",".join(map(str, tokens))
        response = self.http.get(f"{self.url}/api/v1/kv/lookup", params={"tokens": listed})
        answer: dict[str, Any] = response.raise_for_status().json()
        return answer

    def clear(self, *tiers: str) -> None:
        """POST /api/v1/kv/clear, until all its parts have answered in time. Raises ServerError."""

        def is_cleared() -> bool:
            answer = self.http.post(f"{self.url}/api/v1/kv/clear", json={"tiers": tiers}, timeout=patience(20))
            return answer.raise_for_status().is_success

        self.wait_until(is_cleared, f"{', '.join(tiers)} are cleared", COMES_BACK_S)

    def reset(self) -> None:
        """Make the server what it was after its start: well, idle, with nothing stored in any tier.

        Raises ServerError where a request, a copy, a lease or a pin of an earlier user keeps it from that.
        """
        self.wait_until(lambda: self.health()["status"] == "ok", "all parts are well", COMES_BACK_S)
        self.wait_until_idle()
        self.clear("device", "cpu", "redis")
        self.wait_until(lambda: self.segments("cpu") == self.segments("redis") == 0, "both shared tiers are empty")
        self.wait_until_idle()

    def wait_until(self, condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
        """Ask until `condition` holds; an HTTP error counts as "not yet". Raises ServerError.

        Ever more seldom, for what answers is what is waited for; until the deadline, stretched on a slow machine.
        """

        def asked() -> bool:
            with contextlib.suppress(httpx.HTTPError, ServerError):
                return condition()
            return False

        try:
            until(asked, what, deadline_s, FIRST_PAUSE_S, LONGEST_PAUSE_S, self.clock)
        except TimeoutError as late:
            raise ServerError(str(late)) from None

    def wait_until_idle(self) -> None:
        """Until no request runs, no copy is under way, and no lease or reservation is open.

        Two scrapes must say so. Each asks the manager first, and misses a save that the replicas then hand to it.
        It may take half a minute: the lease of a plan whose answer was lost ends by itself.
        """
        nothing = (
            "crosskv_index_leases",
            "crosskv_index_reservations",
            "crosskv_index_demotions",
            "vllm:num_requests_running",
        )
        blocks = ("crosskv_device_free_blocks", "crosskv_device_blocks")

        def idle() -> bool:
            samples = self.metrics(*nothing, *blocks)
            total = {name: sum(value for found, _, value in samples if found == name) for name, _, _ in samples}
            if not total.keys() >= {*nothing, *blocks}:
                return False  # a part gave no metrics
            free = total["crosskv_device_free_blocks"]
            replicas = sum(found == "crosskv_device_blocks" for found, _, _ in samples)
            return all(total[name] == 0 for name in nothing) and free == total["crosskv_device_blocks"] - replicas

        self.wait_until(lambda: idle() and idle(), "all blocks, leases and reservations are given back", COMES_BACK_S)

    def late_loads(self) -> float:
        """How often the manager, a tier or Redis did not answer in time for a load, or was not asked therefore."""
        kinds = (
            "plan_unanswered", "plan_not_asked", "fetch_late", "fetch_not_asked", "redis_late", "redis_not_asked",
            "redis_unreachable",
        )  # fmt: skip
        return sum(
            value
            for name, labels, value in self.metrics("crosskv_degradations_total")
            if name == "crosskv_degradations_total" and labels["kind"] in kinds
        )

    def in_time(self, trial: Callable[[], T]) -> T:
        """What `trial` returns when no load is late in it, of at most three runs.

        A load that is late ends early, and its prompt is recomputed. Where a busy machine may stand still for a second,
        what is loaded can be compared in no other way. Raises ServerError when loads are late in all three.
        """
        for _ in range(3):
            late = self.late_loads()
            found = trial()
            if self.late_loads() == late:
                return found
        raise ServerError("loads were late three times")

    def copy_to_redis(self, use: Callable[[], object]) -> None:
        """Use it until Redis has what the CPU tier has: a copy that failed is made again after a later use only."""

        def copied() -> bool:
            use()
            self.wait_until_idle()
            return self.segments("redis") == self.segments("cpu") > 0

        self.wait_until(copied, "Redis has all of it")

    def processes(self, title: str) -> list[psutil.Process]:
        """The server's processes whose command line begins with `title`, such as `ray::CPUTier`, or with that name."""
        found = []
        for process in self.launcher.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(title) or process.name() == title:
                    found.append(process)
        return found

    def ray_environment(self) -> dict[str, str]:
        """What a process needs in its environment to join this server's Ray."""
        token = run_folder(self.port) / TOKEN_FILE
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), ON_NETWORK: "0"}

    def gcs_address(self) -> str:
        """Where Ray's own control service of this server listens."""
        for process in self.launcher.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                for word in process.cmdline():
                    if word.startswith("--gcs-address="):
                        return word.partition("=")[2]
        raise ServerError("no process of the server names Ray's address")


@contextlib.contextmanager
def started(
    folder: Path, settings: Mapping[str, Any], wanted_status: str = "ok", key: str | None = None
) -> Iterator[RunningServer]:
    """A server as `make serve` starts it, with these settings over those of serve_config.yaml.

    `key`: an administrator's, where the settings have keys. Everything that it writes lies in `folder`. Raises
    ServerError when it does not start, or leaves a process behind.
    """
    # A copy: training may replace the model's files meanwhile.
    model_folder = folder / "demo"
    if not model_folder.exists():
        shutil.copytree(PROJECT_ROOT / "models" / "demo", model_folder)
    ours = {
        "model": str(model_folder),
        **settings,
        "kv": {"redis_folder": str(folder / "redis"), **settings.get("kv", {})},
    }
    config, port, log = write_config(folder, ours, ("kv", "http")), free_port(), folder / "launch.log"
    url, http = f"http://127.0.0.1:{port}", local_http(key)

    def well() -> bool:
        return health_of(http, url)["status"] == wanted_status

    logs = (run_folder(port) / "server.log",)
    with running(launch_command(config, port), url, well, log, patience(START_S), logs) as server:
        yield RunningServer(url, port, model_folder, server.process, log, http)
    if server.left_behind:
        raise ServerError(f"Ctrl-C left processes behind: {server.left_behind}")
