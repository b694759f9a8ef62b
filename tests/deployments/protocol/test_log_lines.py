"""Which HTTP request a line of the log is of: in tasks, on threads, and by what an engine's request carries."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.protocol.log_lines import CLIENT_REQUEST, JsonLines, engine_request_id, lines_of, names_request


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO]:
    """A logger of JSON lines, and what it has written."""
    stream, logger = io.StringIO(), logging.Logger("here")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    return logger, stream


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

    request = SimpleNamespace(kv_transfer_params={CLIENT_REQUEST: "order-2"})
    assert Side().add(request, said="plain") == "plain"
    Side().add(SimpleNamespace(request=request))
    Side().add(SimpleNamespace(kv_transfer_params=None))
    assert ids(stream) == ["order-2", "order-2", None]
    assert engine_request_id({CLIENT_REQUEST: "order-2"}) == "order-2"
