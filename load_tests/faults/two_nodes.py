"""`python -m load_tests.faults.two_nodes`: two Ray nodes with a replica each, and the link between them is cut.

The far node has a network of its own (a Linux network namespace), joined to this machine's by a bridge that stands in
for the switch. Taking the bridge's port down cuts the link as a pulled cable does: no process is told. The near node
holds the ingress and the manager. Needs root and iproute2's `ip`.

Exit codes: 0 everything was as it must be, 1 something was wrong, 2 such a network cannot be made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import psutil
import typer

from app.launch.ports import free_port
from configs.model_folder import PROJECT_ROOT
from load_tests.faults.streams import Stream, run_stream
from load_tests.harness.client import Client
from load_tests.harness.conversations import text, tokenize
from load_tests.harness.patience import until
from load_tests.harness.server import local_http, write_config
from load_tests.measuring import report
from load_tests.measuring.program import EXIT_FELL_SHORT, JsonFile, one_sentence

NEAR, FAR = "10.213.0.1", "10.213.0.2"
STORE_BYTES = 300_000_000
SETTINGS = {
    "dtype": "float32",
    "kv": {"redis_url": None, "cpu_tier_bytes": "128MiB", "load_or_recompute": "load"},
}
START_S = 300.0
STREAMS, PROMPT_TOKENS, ANSWER_TOKENS = 6, 600, 400
DRAWS = 5
PROBE_TOKENS, PROBE_ANSWER, PROBE_EVERY_S = 60, 4, 0.5
AFTERWARDS_S = 5.0
BACK_S = 180.0

COLUMNS = {
    "link cut for": "{0.cut_s:.0f} s",
    "streams": "{0.streams}",
    "of the far node": "{0.far}",
    "broken": "{0.broken}",
    "wrong": "{0.wrong}",
    "longest silence": "{0.silence_s:.1f} s",
    "probes": "{0.probes}",
    "failed": "{0.failed}",
    "slowest": "{0.slowest_s:.1f} s",
    "both replicas back after": "{0.back_after_s:.0f} s",
}


class NoNetworkError(RuntimeError):
    """This process may not make networks."""


class Link:
    """Between the near node, which is this machine, and the far one. Close it when no process is in it any more."""

    def __init__(self) -> None:
        """Raises NoNetworkError."""
        number = os.getpid()
        self.far, self._switch = f"far{number}", f"switch{number}"
        self._near = f"near{number}"
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise NoNetworkError("a network of its own needs root, and the command `ip` (Debian: iproute2)")
        try:
            for name in (self.far, self._switch):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            _ip("link", "add", self._near, "type", "veth", "peer", "name", "near", "netns", self._switch)
            _ip("-n", self.far, "link", "add", "far", "type", "veth", "peer", "name", "far", "netns", self._switch)
            for port in ("near", "far"):
                _ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            _ip("addr", "add", f"{NEAR}/24", "dev", self._near)
            _ip("link", "set", self._near, "up")
            _ip("-n", self.far, "addr", "add", f"{FAR}/24", "dev", "far")
            _ip("-n", self.far, "link", "set", "far", "up")
        except subprocess.CalledProcessError as error:
            self.close()
            raise NoNetworkError(f"`ip` cannot make a network here: {error.stderr.strip()}") from None

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """While the context lasts, nothing gets through."""
        _ip("-n", self._switch, "link", "set", "far", "down")
        try:
            yield
        finally:
            _ip("-n", self._switch, "link", "set", "far", "up")

    def close(self) -> None:
        """Remove what there is of it."""
        for words in (("link", "del", self._near), ("netns", "del", self.far), ("netns", "del", self._switch)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*words)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Nodes:
    """A server on two nodes, over HTTP at the near one."""

    url: str
    link: Link

    def health(self) -> str:
        """`ok`, or another word; empty while there is no answer."""
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            return str(local_http().get(f"{self.url}/health", timeout=5).json()["status"])
        return ""


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """A cluster as docs/guide/redis.md says, under "Several machines"; what it prints lies in `folder`.

    The far node joins when the near one has all parts but the second replica, so that this one alone is far.
    """
    token = folder / "token"
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    token.chmod(0o600)
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "CROSSKV_SECRET": secrets.token_hex(32),
    }
    port, ray_port = free_port(), free_port()
    here = f"{NEAR}:{ray_port}"
    with contextlib.ExitStack() as stack:
        # Sockets lie in it, whose paths may have 107 bytes.
        ray_folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="crosskv-", ignore_cleanup_errors=True))
        # A folder of its own, as another machine has: Ray keeps the node's address in it. And a supervisor, as another
        # machine has: Ray's daemon ends when it hears that the head took its node for dead during a long cut.
        apart = ["sh", "-c", f"mount -t tmpfs none '{ray_folder}' && while :; do \"$@\"; sleep 1; done", "sh"]
        link = Link()
        stack.callback(link.close)

        def start(name: str, *words: str, before: Sequence[str] = ()) -> None:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            command = [*before, str(Path(sys.executable).with_name(words[0])), *words[1:]]
            process = psutil.Popen(command, env=environment, cwd=PROJECT_ROOT, stdout=log, stderr=log)
            stack.callback(_end, process)

        node = ("--block", f"--object-store-memory={STORE_BYTES}", "--num-cpus=1", "--disable-usage-stats")
        alone = ("--head", "--include-dashboard=false", f"--temp-dir={ray_folder}", f"--port={ray_port}")
        start("near", "ray", "start", *node, *alone, f"--node-ip-address={NEAR}")
        until(
            lambda: "Ray runtime started" in (folder / "near.log").read_text(encoding="utf-8"),
            "Ray has started",
            START_S,
        )
        config = write_config(folder, SETTINGS, ("kv",), port)
        start("serve", "serve", "run", f"--address={here}", str(config))
        nodes = Nodes(f"http://127.0.0.1:{port}", link)
        until(lambda: nodes.health() == "degraded", "the near node's replica answers", START_S)
        far = ("ip", "netns", "exec", link.far, "unshare", "-m", *apart)
        start("far", "ray", "start", *node, f"--address={here}", f"--node-ip-address={FAR}", before=far)
        until(lambda: nodes.health() == "ok", "the far node's replica has joined", START_S)
        yield nodes


def _end(process: psutil.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        everybody = [process, *process.children(recursive=True)]
        process.terminate()
        _, left = psutil.wait_procs(everybody, timeout=10)
        for one in left:
            one.kill()
        psutil.wait_procs(left, timeout=10)


@dataclass
class Outcome:
    """Of one cut."""

    cut_s: float
    streams: int = 0
    far: int = 0
    broken: int = 0
    wrong: int = 0
    silence_s: float = 0.0
    probes: int = 0
    failed: int = 0
    slowest_s: float = 0.0
    back_after_s: float = 0.0

    @property
    def right(self) -> bool:
        """Nothing broke, and something was at stake."""
        return self.far > 0 and not (self.broken or self.wrong or self.failed)


async def cut_under_streams(nodes: Nodes, cut_s: float, rng: Random) -> Outcome:
    """Streams at both nodes when the link is cut, and short prompts meanwhile; held against the answers before it."""
    outcome = Outcome(cut_s)
    async with Client(nodes.url, "demo", timeout_s=300) as client:

        async def ask(prompt: list[int], tokens: int) -> Stream:
            stream = Stream(prompt)
            await run_stream(client, stream, tokens)
            return stream

        async def prompt(tokens: int) -> list[int]:
            return (await tokenize(client, text(rng, 2 * tokens)))[:tokens]

        for _ in range(DRAWS):  # the router sends prompts where it likes
            prompts = [await prompt(PROMPT_TOKENS) for _ in range(STREAMS)]
            expected = await asyncio.gather(*(ask(each, ANSWER_TOKENS) for each in prompts))
            outcome.far = sum(stream.kv_cache.get("replica") == "1" for stream in expected)
            if outcome.far:
                break
        streams = [Stream(each) for each in prompts]
        tasks = [asyncio.create_task(run_stream(client, each, ANSWER_TOKENS)) for each in streams]
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        began, probes = time.monotonic(), list[asyncio.Task[Stream]]()
        with nodes.link.cut():
            while time.monotonic() - began < cut_s:
                probes.append(asyncio.create_task(ask(await prompt(PROBE_TOKENS), PROBE_ANSWER)))
                await asyncio.sleep(PROBE_EVERY_S)
        answered = await asyncio.gather(*probes)
        await asyncio.gather(*tasks)
    outcome.streams, outcome.probes = len(streams), len(answered)
    outcome.broken = sum(not stream.ended for stream in streams)
    outcome.wrong = sum(
        stream.tokens != right.tokens[: len(stream.tokens)] for stream, right in zip(streams, expected, strict=True)
    )
    outcome.silence_s = max(stream.longest_silence_s for stream in streams)
    outcome.failed = sum(not probe.ended for probe in answered)
    outcome.slowest_s = max(probe.seconds for probe in answered)
    return outcome


def run_cut(nodes: Nodes, cut_s: float, rng: Random) -> Outcome:
    """One cut, and the wait until both replicas serve again."""
    outcome = asyncio.run(cut_under_streams(nodes, cut_s, rng))
    began = time.monotonic()
    time.sleep(AFTERWARDS_S)  # /health says what was before, for a moment
    until(lambda: nodes.health() == "ok", "both replicas are back", BACK_S)
    outcome.back_after_s = time.monotonic() - began
    return outcome


def main(
    cut_s: Annotated[list[float] | None, typer.Option(help="Seconds; repeatable.")] = None,
    seed: int = 0,
    json_file: JsonFile = None,
) -> None:
    """Cut the link between two nodes for 3 and for 12 s, or as told."""
    rng = Random(seed)
    with (
        one_sentence(NoNetworkError, TimeoutError),
        tempfile.TemporaryDirectory() as folder,
        two_nodes(Path(folder)) as nodes,
    ):
        outcomes = [run_cut(nodes, seconds, rng) for seconds in cut_s or [3.0, 12.0]]
    rows: list[dict[str, Any]] = [asdict(outcome) for outcome in outcomes]
    report.deliver(report.rows(COLUMNS, outcomes), rows, json_file)
    raise typer.Exit(EXIT_FELL_SHORT if not all(outcome.right for outcome in outcomes) else 0)


if __name__ == "__main__":
    typer.run(main)
