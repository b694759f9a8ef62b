"""The audit log: one line of JSON for each change that a caller has ordered, and what came of it.

The logger is `crosskv.audit`. A line says who (the tenant of the key, and whether it is an administrator's), what, the
request's own parameters, how much, and the outcome: "done", the reason why not, or the name of an error. It is written
when the order has ended: for a job, when the job has. Prompts are not in it. Where nothing has configured logging the
lines go to standard error.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from app.gate.auth import Caller

_audit = logging.getLogger("crosskv.audit")
_audit.setLevel(logging.INFO)
_LONGEST_VALUE = 200


class Line:
    """What will be written of one order; `came_of_it` is what the manager answered, or will."""

    def __init__(self, caller: Caller, what: str, asked: dict[str, Any]) -> None:
        self.outcome = "done"
        self._is_jobs = False
        self._said = {"who": caller.tenant, "admin": caller.admin, "what": what, **asked}
        self._began = time.monotonic()

    def came_of_it(self, answer: dict[str, Any]) -> None:
        """Add the amounts of an answer, and its outcome or refusal."""
        self.outcome = str(answer.get("refused") or answer.get("outcome") or "done")
        told = {name: value for name, value in answer.items() if name not in ("message", "outcome", "refused")}
        self._said["amount"] = told if len(json.dumps(told, default=str)) <= 10 * _LONGEST_VALUE else {}

    def leave_to_job(self) -> None:
        """The order has been given, and what comes of it the job's own line says."""
        self._is_jobs = True

    def write(self) -> None:
        """Write it, in one line: whatever a name holds, JSON has no line breaks."""
        if self._is_jobs and self.outcome == "done":
            return
        if not _audit.hasHandlers():
            _audit.addHandler(logging.StreamHandler(sys.stderr))
        said = {name: value[:_LONGEST_VALUE] if isinstance(value, str) else value for name, value in self._said.items()}
        took = round(time.monotonic() - self._began, 3)
        _audit.info("%s", json.dumps({**said, "outcome": self.outcome, "seconds": took}, default=str))


@contextmanager
def audited(caller: Caller, what: str, **asked: Any) -> Iterator[Line]:
    """Write a line at the end of an order, also of one that fails: then `outcome` names the error."""
    line = Line(caller, what, asked)
    try:
        yield line
    except BaseException as error:
        line.outcome = line.outcome if line.outcome != "done" else type(error).__name__
        raise
    finally:
        line.write()


def audited_work(
    caller: Caller, what: str, work: Callable[[], Awaitable[dict[str, Any]]], **asked: Any
) -> Callable[[], Awaitable[dict[str, Any]]]:
    """A job's work, with a line at its end."""

    async def wrapped() -> dict[str, Any]:
        with audited(caller, what, **asked) as line:
            answer = await work()
            line.came_of_it(answer)
            return answer

    return wrapped
