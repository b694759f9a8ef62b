"""Log lines of a deployment's process: text, or JSON objects that name the HTTP request they are of.

With `http.log_format: json` each line is an object:

{"time": "2026-01-31T12:00:00.123Z", "level": "WARNING", "logger": "app.…", "message": "…", "request_id": "…"}

`request_id` is there where a request is known, `exception` where there is one, and the `fields` that a line was given
with its message. In a replica the id comes with the prompt (`GenerateRequest.client_request_id`); the engine is given
it in the request's `EngineHints`, and the transfer threads run in the context of the caller that gave them their
work.

vLLM would set logging up with an engine's configuration, by `logging.config.dictConfig`, which closes each handler of
the process. Serve's then writes nothing, keeps each line for ever, and fails a new controller's first question, for
which all replicas are started again. So vLLM is told to leave logging alone (`deployments.engine.engine_args`), and its
lines get their handler here.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, TypeVar

from deployments.protocol.engine_hints import hints_of

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

REQUEST_ID: ContextVar[str] = ContextVar("crosskv_request_id", default="")
"""What the client of the HTTP request that is worked for is told as `x-request-id`."""
FIELDS = "crosskv_fields"
"""Key in `extra` of a mapping that a line shows after its message."""
_OURS = ("app", "configs", "deployments", "kernels", "kvmanager")
_ENGINE = "vllm"
_TEXT = "%(levelname)s %(asctime)s [%(name)s:%(lineno)d] %(message)s"


class JsonLines(logging.Formatter):
    """See the module's docstring."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever stands in the message."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)  # ASCII: terminals obey some other characters, readers end lines at some


def set_up_log(log_format: str, handler: logging.Handler | None = None) -> None:
    """Give vLLM's lines a handler, and in JSON those of the project's own packages; on stderr or at `handler`.

    To be called before vLLM is imported, with its environment set: `VLLM_LOGGING_LEVEL` is what vLLM says.
    """
    handler = handler or logging.StreamHandler()
    in_json = log_format == "json"
    handler.setFormatter(JsonLines() if in_json else logging.Formatter(_TEXT))
    levels = {_ENGINE: os.environ.get("VLLM_LOGGING_LEVEL", "WARNING").upper()}
    if in_json:
        levels |= dict.fromkeys(_OURS, "INFO")
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


@contextmanager
def lines_of(request_id: str) -> Iterator[None]:
    """Lines that this task or thread writes meanwhile are of this HTTP request; empty: of none."""
    token = REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        REQUEST_ID.reset(token)


def engine_request_id(transfer: dict[str, Any] | None) -> str:
    """The id that the `kv_transfer_params` of an engine's request name; empty: none."""
    return hints_of(transfer).client_request


def names_request(method: Callable[Concatenate[S, Any, P], R]) -> Callable[Concatenate[S, Any, P], R]:
    """Let a method's lines be of the vLLM `Request` that it is given first, or that what it is given has."""

    @functools.wraps(method)
    def named(self: S, subject: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        request = getattr(subject, "request", subject)
        with lines_of(engine_request_id(request.kv_transfer_params)):
            return method(self, subject, *args, **kwargs)

    return named
