"""The ingress over real HTTP: vLLM's own serving classes on the demo model, in front of what backend a test gives."""

from __future__ import annotations

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
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from app.backend.protocols import Backend
from app.ingress import create_app
from configs.settings import Settings, load_settings
from kvmanager.segments.server_secret import ServerSecret

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
    **http: object,
) -> Settings:
    shared = {"roles": roles, "replicas": roles["prefill"] + roles["decode"]} if roles else {}
    return load_settings(
        {"max_model_len": CONTEXT, "scenario": scenario, "http": http, "engine": dict(engine or {}), **shared}
    )


@dataclass
class Server:
    """A running ingress."""

    url: str
    replicas: FakeReplicas

    def client(self, **options: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})  # type: ignore[arg-type]

    def http(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, verify=CERTIFICATES, **options)  # type: ignore[arg-type]


@contextlib.contextmanager
def serve(vllm_config: VllmConfig, behind: Backend, loopback: bool = True, **http: object) -> Iterator[Server]:
    """Serve the ingress on a free port, on a thread of its own."""
    ready = threading.Event()
    holder: list[uvicorn.Server] = []

    def run() -> None:
        app = create_app(settings_with(**http), vllm_config, behind, FINGERPRINT, SECRET, loopback=loopback)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", backlog=4096))
        holder.append(server)
        ready.set()
        server.run()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    while not holder[0].started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = holder[0].servers[0].sockets[0].getsockname()[1]
    try:
        yield Server(f"http://127.0.0.1:{port}", behind.replicas)  # type: ignore[arg-type]
    finally:
        holder[0].should_exit = True
        thread.join(10)


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
