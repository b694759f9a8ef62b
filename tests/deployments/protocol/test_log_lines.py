"""Which HTTP request a line of the log is of, and that a process's log goes on when vLLM has been imported."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.settings import load_settings
from deployments.engine.engine_args import engine_environment
from deployments.protocol.engine_hints import EngineHints
from deployments.protocol.log_lines import (
    JsonLines,
    engine_request_id,
    lines_of,
    names_request,
    set_up_log,
)


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO]:
    """A logger of JSON lines, and what it has written."""
    stream, logger = io.StringIO(), logging.Logger("here")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    return logger, stream


@pytest.fixture
def loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `set_up_log` changes is as before afterwards."""
    for name in ("app", "configs", "deployments", "kernels", "kvmanager", "vllm"):
        logger = logging.getLogger(name)
        for what in ("handlers", "propagate", "level"):
            monkeypatch.setattr(logger, what, getattr(logger, what))


def ids(stream: io.StringIO) -> list[str | None]:
    return [json.loads(line).get("request_id") for line in stream.getvalue().splitlines()]


def test_lines_are_of_the_request_that_is_worked_for_and_of_none_afterwards(log: Any) -> None:
    logger, stream = log
    with lines_of("order-1"):
        logger.warning("within")
        with lines_of(""):
            logger.warning("of nobody")
        logger.warning("within again")
    logger.warning("after")
    assert ids(stream) == ["order-1", None, "order-1", None]


def test_two_tasks_and_a_thread_each_name_their_own(log: Any) -> None:
    logger, stream = log

    async def work(request_id: str) -> None:
        with lines_of(request_id):
            await asyncio.sleep(0)
            logger.warning(request_id)

    async def both() -> None:
        await asyncio.gather(work("a"), work("b"))

    with lines_of("mine"):
        asyncio.run(both())
        thread = threading.Thread(target=lambda: logger.warning("a thread of its own"))
        thread.start()
        thread.join()
    assert ids(stream) == ["a", "b", None]


def test_a_method_names_the_request_that_it_is_given_or_that_is_tracked(log: Any) -> None:
    logger, stream = log

    class Side:
        @names_request
        def add(self, request: Any, said: str = "") -> str:
            logger.warning(said)
            return said

    request = SimpleNamespace(kv_transfer_params=EngineHints(client_request="order-2").as_transfer())
    assert Side().add(request, said="plain") == "plain"
    Side().add(SimpleNamespace(request=request))
    Side().add(SimpleNamespace(kv_transfer_params=None))
    assert ids(stream) == ["order-2", "order-2", None]
    assert engine_request_id(EngineHints(client_request="order-2").as_transfer()) == "order-2"


AS_A_REPLICA = """
import gc, logging, sys
gc.disable()  # else a quarter of the time goes to looking through what is imported
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig
configure_component_logger(
    component_name="Replica",
    component_id="1",
    logging_config=LoggingConfig(logs_dir=sys.argv[1]),
    max_bytes=1000,
    backup_count=1,
)
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging_if_needed
configure_logging_if_needed(LoggingConfig())  # as the making of an engine's configuration does
(handler,) = [one for one in logging.getLogger("ray.serve").handlers if hasattr(one, "target")]
assert handler.target is not None, "a new controller's first question to the replica would fail"
logging.getLogger("ray.serve").info("afterwards")
assert handler.buffer == []
"""


def test_vllm_leaves_serves_log_alone_whatever_the_environment_says(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "1")
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", str(tmp_path / "none.json"))
    environment = os.environ | dict(engine_environment(load_settings({"model": str(model_folder)})))
    command = [sys.executable, "-c", AS_A_REPLICA, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.log")
    assert "afterwards" in file.read_text()


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_vllms_own_lines_are_written_in_the_form_that_was_asked_for(log_format: str, loggers: None) -> None:
    stream = io.StringIO()
    set_up_log(log_format, logging.StreamHandler(stream))
    logging.getLogger("vllm.any").warning("of the engine")
    logging.getLogger("vllm.any").info("too little")
    (line,) = stream.getvalue().splitlines()
    if log_format == "json":
        told = {"level": "WARNING", "logger": "vllm.any", "message": "of the engine"}
        assert json.loads(line).items() >= told.items()
    else:
        assert line.startswith("WARNING ")
        assert line.endswith("] of the engine")
