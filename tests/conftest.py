"""What every test may rely on: a Ray without token auth, no hub, and a folder that passes for a model.

And which tests are run, in which process and order (`handing_out.py`), and how long they took (`durations.py`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
from httpx._transports import default as _transports

from tests.durations import Durations, handed_over, left_out_of, needs_of, timed_start
from tests.handing_out import Pieces, longest_first, rewrite_share
from tests.model_files import write_model
from tests.programs import pytest_sessionstart  # noqa: F401
from tests.sizes import LONG
from tests.surroundings import _known_machine, each_processor, own_machine  # noqa: F401

# Each of httpx's clients would read all certificates that this machine trusts, which takes longer than most tests.
_transports.create_ssl_context = functools.cache(_transports.create_ssl_context)  # type: ignore[attr-defined]

T = TypeVar("T")
PACKAGES = ("app", "configs", "deployments", "kernels", "kvmanager", "load_tests", "models")
LEFT_OUT = pytest.StashKey[list[pytest.Function]]()

# Until the tests are collected: a third of that time went to looking through a million objects that all stay.
gc.disable()

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
    VLLM_CONFIGURE_LOGGING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_USE_V2_MODEL_RUNNER="0",
    RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH=str(2**31 - 1),  # `deployments.replica.serve_process`
    TORCHDYNAMO_DISABLE="1",  # else the first request for logprobs waits half a minute for a C++ compiler
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--store-durations`."""
    parser.addoption(
        "--store-durations",
        action="store_true",
        help="write tests/durations.json, by which `make test` hands files out; for a whole run on a quiet machine",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Add up durations in the process that shows them."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config), Durations.__name__)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Share out what each process would do for itself."""
    told = getattr(session.config, "workerinput", None)
    if told is not None:
        rewrite_share(session.config, int(told["workerid"].removeprefix("gw")), told["workercount"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Leave out what is marked `long`, except in `make test-long`, and put the rest in order."""
    config.stash[LEFT_OUT] = []
    if not LONG:
        config.stash[LEFT_OUT] = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=config.stash[LEFT_OUT])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if hasattr(config, "workerinput"):
        longest_first(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collect garbage from now on, but look at nothing that was imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what this process knows to the one that adds up."""
    gc.unfreeze()  # nanobind warns of objects that it does not see go
    config = session.config
    told = handed_over(needs_of(session.items), left_out_of(config.stash.get(LEFT_OUT, [])))
    if hasattr(config, "workeroutput"):
        config.workeroutput |= told
    else:
        config.pluginmanager.get_plugin(Durations.__name__).hand_over(told)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out pieces of work with `--dist loadfile`."""
    return Pieces(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture
def own_records(caplog: pytest.LogCaptureFixture) -> Callable[[], list[logging.LogRecord]]:
    """Return what this project has logged. Others may at any time: a loop of an earlier test that is collected now."""
    return lambda: [record for record in caplog.records if record.name.partition(".")[0] in PACKAGES]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that passes for a model of 4,096 tokens while settings are checked; its weights are none."""
    return write_model(tmp_path_factory.mktemp("model"))


class OneEngine:
    """The engine of this process, of which vLLM's globals allow one: whoever starts another one ends it."""

    def __init__(self) -> None:
        self._end: Callable[[], None] | None = None

    def end(self) -> None:
        """End the running engine, if there is one."""
        end, self._end = self._end, None
        if end is not None:
            end()
        # vLLM looks for garbage four times while it builds an engine; at an engine's end it looks through all.
        gc.freeze()

    def start(self, start: Callable[[], T], end: Callable[[T], None]) -> T:
        """The new engine; `end` is called with it when it has to go."""
        self.end()
        with timed_start("engine", getattr(start, "__qualname__", "")):
            engine = start()
        self._end = lambda: end(engine)
        return engine


@pytest.fixture(scope="session")
def one_engine() -> Iterator[OneEngine]:
    """For all tests that need an engine in this process, wherever they lie."""
    only = OneEngine()
    yield only
    only.end()


class OneRay:
    """The Ray of this process and the Serve in it, each from when it is first asked for."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._serve_port = 0

    def get(self) -> Any:
        """Return Ray: no dashboard, no spilling, logical CPUs enough for many small actors."""
        import ray

        from app.launch.cluster import LOOKS_SELDOM
        from app.launch.ray_start import agents_given_ports

        if not ray.is_initialized():
            told = mock.patch.dict(os.environ, LOOKS_SELDOM)
            with timed_start("ray", "shared"), agents_given_ports(), told:
                ray.init(
                    address="local",
                    namespace="serve",
                    include_dashboard=False,
                    num_cpus=8,
                    object_store_memory=256 * 1024**2,
                    log_to_driver=False,
                    _system_config={"automatic_object_spilling_enabled": False},
                )
            self._stack.callback(ray.shutdown)
        return ray

    def serve(self, port: Callable[[], int]) -> int:
        """Return the port on which Serve listens: `port()` where it does not run yet."""
        from ray import serve

        self.get()
        if not self._serve_port:
            self._serve_port = port()
            serve.start(http_options={"host": "127.0.0.1", "port": self._serve_port})
            self._stack.callback(serve.shutdown)
        return self._serve_port

    def end(self) -> None:
        """End them, if they run."""
        self._serve_port = 0
        self._stack.close()


ONLY_RAY = pytest.StashKey[OneRay]()


@pytest.fixture(scope="session")
def one_ray(pytestconfig: pytest.Config) -> Iterator[OneRay]:
    """For all fixtures that need a Ray."""
    pytestconfig.stash[ONLY_RAY] = only = OneRay()
    yield only
    only.end()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End Ray after the last file that needs one: with Serve it takes a twelfth of a core while it does nothing."""
    only = item.config.stash.get(ONLY_RAY, None)
    if only is not None and (nextitem is None or not _needs_ray(item.session, nextitem.path)):
        only.end()


@functools.cache
def _needs_ray(session: pytest.Session, file: Path) -> bool:
    return any(item.path == file and "one_ray" in getattr(item, "fixturenames", ()) for item in session.items)


@pytest.fixture(scope="module")
def ray_cluster(one_ray: OneRay) -> Any:
    """A Ray of this test session's own."""
    return one_ray.get()
