"""Ports for what is started now and listens a little later."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20_000, 32_000
"""Above what Ray gives its workers (10,002 to 19,999), below what Linux gives to connections (from 32,768): a port of
either may be taken a second after it was found free."""
_TRIES = 100
_DRAWN = random.SystemRandom()
"""An engine in this process seeds Python's own numbers, and with them would choose the ports of another one."""


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that no process listens on now, and that the system assigns only on request.

    Raises:
        OSError: none was found.
    """
    for _ in range(_TRIES):
        port = _DRAWN.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port between {_FIRST} and {_LAST} was found in {_TRIES} tries")
