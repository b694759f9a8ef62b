"""What every test may rely on: a Ray without token auth, no hub, and a folder that passes for a model.

And which tests `make test` runs, and in which of its two processes: `pytest_collection_modifyitems` and
`pytest_xdist_make_scheduler`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.programs import pytest_sessionstart  # noqa: F401
from tests.sizes import LONG
from tests.surroundings import _known_machine, each_processor, own_machine  # noqa: F401

T = TypeVar("T")

# A shell's background job ignores Ctrl-C, and so would all that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports ray, vllm or transformers.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15 a replica's start waits for all other tests
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As a replica's process has it. Here for all tests, so that none depends on which folder was collected before its own.
os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_USE_V2_MODEL_RUNNER="0",
    RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH=str(2**31 - 1),  # `deployments.replica.serve_options`
    TORCHDYNAMO_DISABLE="1",  # else the first request for logprobs waits half a minute for a C++ compiler
)


WHOLE_SERVERS = ("tests/end_to_end/", "tests/app/launch/test_launch.py", "tests/deployments/together/test_two_nodes.py")
"""What starts whole servers, or clusters of its own: two cores have room for one at a time."""


KEPT_RUNNING = {"ray_cluster", "one_engine", "demo_model"}
"""Fixtures of tests that start what others go on with, or take long."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """`make test` leaves out what is marked `long`. And the order of each of two processes.

    Whole servers come first, for they take longest; a test's own before the one that is shared. Then come the files
    that need a Ray or an engine: the process of the servers, which is free later, would start a second one of each.
    What is left is short, so that both end together.
    """
    if not LONG:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if hasattr(config, "workerinput"):
        early = {item.path for item in items if not KEPT_RUNNING.isdisjoint(item.fixturenames)}
        items.sort(
            key=lambda item: (
                not item.nodeid.startswith(WHOLE_SERVERS),
                "world" in item.fixturenames,
                item.path not in early,
            )
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` all whole servers go to one process, as the tests of a file do.

    A file is not split: its tests share an engine, a Ray or an ingress, which would be started twice. A mark would do
    nothing: pytest-xdist 3.8.0 writes its group into `item._nodeid`, which pytest 9.2.0 does not read.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ServersAndFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "whole servers" if nodeid.startswith(WHOLE_SERVERS) else nodeid.partition("::")[0]

    return ServersAndFiles(config, log)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that passes for a model of 4,096 tokens while settings are checked; it holds no weights."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    return folder


class OneEngine:
    """The engine of this process, of which vLLM's globals allow one: whoever starts another one ends it."""

    def __init__(self) -> None:
        self._end: Callable[[], None] | None = None

    def end(self) -> None:
        """End the running engine, if there is one."""
        end, self._end = self._end, None
        if end is not None:
            end()

    def start(self, start: Callable[[], T], end: Callable[[T], None]) -> T:
        """The new engine; `end` is called with it when it has to go."""
        self.end()
        engine = start()
        self._end = lambda: end(engine)
        return engine


@pytest.fixture(scope="session")
def one_engine() -> Iterator[OneEngine]:
    """For all tests that need an engine in this process, wherever they lie."""
    only = OneEngine()
    yield only
    only.end()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray of this test session's own: no dashboard, no spilling, logical CPUs enough for many small actors."""
    import ray

    ray.init(
        address="local",
        namespace="serve",
        include_dashboard=False,
        num_cpus=8,
        object_store_memory=256 * 1024**2,
        log_to_driver=False,
        _system_config={"automatic_object_spilling_enabled": False},
    )
    yield ray
    ray.shutdown()
