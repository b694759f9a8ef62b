"""The ingress over real HTTP: vLLM's own serving classes on the demo model, in front of what backend a test gives."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn
from fake_backend import FakeReplicas
from prometheus_client import CollectorRegistry
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from app.backend.protocols import Backend
from app.ingress import create_app
from configs.settings import Settings, load_settings
from kvmanager.segments.server_secret import ServerSecret
from load_tests.harness.patience import patience

MODEL = "demo"
CONTEXT = 512
FINGERPRINT = bytes(range(32))
SECRET = ServerSecret(b"the server's secret of 32 bytes.")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Where is the red ball?"}], "max_tokens": 3}
CERTIFICATES = ssl.create_default_context()
"""Nobody here speaks TLS, and each client would read all certificates of the world."""
COMPLETION = {"model": MODEL, "prompt": "The red ball", "max_tokens": 3}


def engine_args(**more: object) -> AsyncEngineArgs:
    return AsyncEngineArgs(
        model=load_settings({}).model_source,
        served_model_name=MODEL,
        dtype="bfloat16",
        max_model_len=CONTEXT,
        block_size=32,
        enforce_eager=True,
        prefix_caching_hash_algo="sha256_cbor",
        **more,  # type: ignore[arg-type]
    )


def settings_with(
    roles: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    scenario: str | None = None,
    chat_template: str | None = None,
    served_model_name: str | None = None,
    tenants: Mapping[str, Any] | None = None,
    **http: object,
) -> Settings:
    shared = {"roles": roles, "replicas": 3} if roles else {}
    whole: dict[str, Any] = {"max_model_len": CONTEXT, "scenario": scenario, "chat_template": chat_template}
    whole |= {"served_model_name": served_model_name, "tenants": dict(tenants or {})}
    return load_settings({**whole, "http": http, "engine": dict(engine or {}), **shared})


@dataclass
class Server:
    """A running ingress."""

    url: str
    replicas: FakeReplicas

    def client(self, **options: object) -> openai.OpenAI:
        http: Any = openai.DefaultHttpxClient(verify=CERTIFICATES)
        more: Any = {"api_key": "none", "max_retries": 0, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", http_client=http, **more)

    def http(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=patience(120), verify=CERTIFICATES, **options)  # type: ignore[arg-type]


class PromptServer(uvicorn.Server):
    """Ends when it is told to; uvicorn's own looks for that ten times a second, and then waits a tenth more."""

    def __init__(self, app: Any, ready: threading.Event) -> None:
        """`ready`: is set once it listens."""
        super().__init__(uvicorn.Config(app, port=0, log_level="warning", backlog=4096))
        self._ready = ready
        self._told_to_end = asyncio.Event()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not self.server_state.tasks

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)
        self._ready.set()
        await self._told_to_end.wait()

    async def shutdown(self, sockets: Any = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await self.lifespan.shutdown()

    def end(self) -> None:
        """End it, from another thread."""
        self._loop.call_soon_threadsafe(self._told_to_end.set)


def _scraped_last(app: Any) -> Any:
    """The app; what has been answered by the time of a scrape has its last turns of the loop first, and is counted."""

    async def called(scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/metrics":
            for _ in range(100):
                await asyncio.sleep(0)
        await app(scope, receive, send)

    return called


@contextlib.contextmanager
def running(
    vllm_config: VllmConfig,
    behind: Backend,
    loopback: bool = True,
    registry: CollectorRegistry | None = None,
    clock: Callable[[], float] = time.monotonic,
    **http: object,
) -> Iterator[PromptServer]:
    """Run the ingress on a free port, on a thread of its own. Its metrics go to `registry`; `clock` is its rates'."""
    ready, made = threading.Event(), list[PromptServer]()

    def run() -> None:
        settings = settings_with(**http)
        app = create_app(
            settings, vllm_config, behind, FINGERPRINT, SECRET, loopback=loopback, registry=registry, clock=clock
        )
        made.append(PromptServer(_scraped_last(app), ready))
        made[0].run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not ready.wait(0.5):
        assert thread.is_alive(), "its traceback is on stderr"
    try:
        yield made[0]
    finally:
        made[0].end()
        thread.join(patience(60))
        assert not thread.is_alive(), "a request goes on"


@contextlib.contextmanager
def serve(vllm_config: VllmConfig, behind: Backend, **options: Any) -> Iterator[Server]:
    """Serve the ingress; `options` are those of `running`."""
    with running(vllm_config, behind, **options) as server:
        yield Server(f"http://127.0.0.1:{server.port}", behind.replicas)  # type: ignore[arg-type]


MOST_TRIALS = 5


def reached(replicas: FakeReplicas, ask: Callable[[], httpx.Response], attempts: int = 1) -> httpx.Response:
    """The answer of the first `ask` whose prompts have reached `attempts` replicas, of at most MOST_TRIALS.

    For requests with a short deadline: a machine that stands still may take all of it before a replica hears of one.
    """
    for _ in range(MOST_TRIALS):
        before = len(replicas.requests)
        answer = ask()
        if len(replicas.requests) - before == attempts:
            break
    return answer


def wait_until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + patience(timeout_s)
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
