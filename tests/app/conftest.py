"""Fixtures of the ingress's tests; `ingress_server` and `fake_backend` beside this file hold what they are made of."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves the modules beside tests unimportable

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_backend import EngineSlot
from fake_backend import FakeReplicas, backend
from ingress_server import Server, engine_args, serve
from shared_ingress import Ingresses
from vllm.config import VllmConfig

from app.backend.protocols import Backend
from app.continuation import generated_tokens
from app.ingress import frontend_config
from app.launch.ports import free_port
from app.openai import api, constraint_pool
from tests.app.constraint_forks import Forks


@pytest.fixture(scope="session")
def vllm_config() -> VllmConfig:
    """The demo model's configuration, loaded once."""
    return frontend_config(engine_args())


@pytest.fixture(scope="session", autouse=True)
def _forked_constraints() -> Iterator[None]:
    """Each ingress's process that tries constraints is forked from one that has imported vLLM."""
    forks = Forks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constraint_pool, "_start", forks.start)
        yield
    forks.end()


@pytest.fixture(scope="module")
def ingresses(vllm_config: VllmConfig) -> Iterator[Ingresses]:
    """Those that the tests of a file share."""
    with contextlib.ExitStack() as stack:
        yield Ingresses(vllm_config, stack)


@pytest.fixture
def start(ingresses: Ingresses) -> Iterator[Callable[..., Server]]:
    """Start a server over a `FakeReplicas` (or another backend) with the given `http` settings, or take one that runs.

    What it has counted is forgotten; what it knows of earlier prompts and replicas is not (`shared_ingress`).
    """
    with contextlib.ExitStack() as stack:

        def starter(replicas: FakeReplicas | None = None, behind: Backend | None = None, **more: object) -> Server:
            return stack.enter_context(ingresses.lend(behind or backend(replicas or FakeReplicas()), **more))

        yield starter


@pytest.fixture
def fresh(vllm_config: VllmConfig) -> Iterator[Callable[..., Server]]:
    """As `start`, but always a server that has not served before."""
    with contextlib.ExitStack() as stack:

        def starter(replicas: FakeReplicas | None = None, behind: Backend | None = None, **more: object) -> Server:
            return stack.enter_context(serve(vllm_config, behind or backend(replicas or FakeReplicas()), **more))

        yield starter


@pytest.fixture
def kept_alive(fresh: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    """As `fresh`, with comments in a stream's silence twenty times a second."""
    monkeypatch.setattr(api, "KEEP_ALIVE_S", 0.05)
    return fresh


@pytest.fixture
def none_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream goes on elsewhere: each of its answers is too long."""
    monkeypatch.setattr(generated_tokens, "MOST_TOKENS", 0)


@pytest.fixture(scope="session")
def engine_slot(one_engine: Any) -> EngineSlot:
    """For all tests here that need an engine."""
    return EngineSlot(one_engine)


@pytest.fixture(scope="module")
def serve_port(one_ray: Any) -> int:
    """A Ray Serve for all tests that need one, listening on this port; each takes its application away again."""
    port: int = one_ray.serve(free_port)
    return port


@pytest.fixture(scope="session")
def server(vllm_config: VllmConfig) -> Iterator[Server]:
    """One server over a `FakeReplicas`, for all tests that need no settings of their own and count from what there is.

    Its process that tries constraints takes seconds to start.
    """
    with serve(vllm_config, backend(FakeReplicas())) as running:
        yield running
