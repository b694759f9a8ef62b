"""The server's log as JSON objects, one a line, for `http.log_format: json`.

The ingress and the replicas write objects (`deployments.protocol.log_lines`), which Ray hands to the launcher's child
with the process in front: `(ServeReplica:crosskv:Replica pid=7) {…}`. Everything else there, Ray's and Serve's lines
and tracebacks, is text. Each line becomes an object here, with the process in it:

{"time": "…", "level": "INFO", "logger": "server", "message": "…", "process": "ServeController", "pid": "9"}

An object keeps what it has. Leans on Ray 2.60: the form of that prefix (`ray._private.worker.print_worker_logs`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from typing import IO, Any

_PREFIX = re.compile(r"\((?P<process>[^()]*?) ?pid=(?P<pid>[^(),]+)(?:, ip=(?P<ip>[^()]+))?\) (?P<said>.*)", re.DOTALL)
_COMMANDS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Of a terminal: colours."""
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_LEVEL_WITHIN = 60
"""Characters: a level further on is a word of a message."""


def as_object(line: str, now_s: float) -> str | None:
    """Return a line of the child's output as a JSON object, in one line; None for an empty one.

    `now_s`: seconds of the wall clock, for a line that says no time in a way that is known.
    """
    text = _COMMANDS.sub("", line).rstrip()
    if not text:
        return None
    prefix = _PREFIX.fullmatch(text)
    whose = {name: value for name, value in prefix.groupdict().items() if value} if prefix else {}
    said = whose.pop("said", "") if prefix else text
    return json.dumps({**(_object(said) or _of_text(said, now_s)), **whose})


def write_objects(lines: Iterable[bytes], file: IO[bytes]) -> None:
    """Write each line as an object, at once, until there are no more. Closes the file."""
    with file:
        for line in lines:
            if (made := as_object(line.decode(errors="replace"), time.time())) is not None:
                file.write(made.encode() + b"\n")
                file.flush()


def _object(said: str) -> dict[str, Any] | None:
    try:
        found = json.loads(said) if said.startswith("{") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _of_text(said: str, now_s: float) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))
    level = _LEVEL.search(said, 0, _LEVEL_WITHIN)
    return {
        "time": f"{stamp}.{int(now_s % 1 * 1000):03d}Z",
        "level": level[0] if level else "INFO",
        "logger": "server",
        "message": said,
    }
