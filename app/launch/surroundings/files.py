"""How many files a process may open here: the hard limit, to which Ray and HAProxy raise their own.

HAProxy reserves all that its connections may need, and does not start where that is more than the limit.
"""

from __future__ import annotations

import os
import resource

from configs.settings import SettingsError

FEWEST = 1024
"""A replica has some 120 files open when idle; the ingress one more for each client."""
_MAXCONN = "RAY_SERVE_HAPROXY_MAXCONN"
_RAYS_MAXCONN = 4096
_FILES_BESIDE_CONNECTIONS = 300
"""Of HAProxy: what it listens on, its checks and its threads; with one ingress it needs 34."""
_FILES_OF_TWO_CONNECTIONS = 5
"""Both ends of each, and half a pipe to splice them by."""


def require_files() -> None:
    """Raise SettingsError where a process may open too few."""
    limit = _limit()
    if limit < FEWEST:
        raise SettingsError(
            f"a process may open {limit} files here (ulimit -Hn), and the server needs {FEWEST}; raise the limit: "
            f"nofile in /etc/security/limits.conf, LimitNOFILE= of a systemd unit, or docker run --ulimit nofile=65536."
        )


def warning() -> str | None:
    """What to say where HAProxy takes fewer connections than it otherwise would."""
    fitting = _fitting()
    if fitting >= _wanted():
        return None
    return (
        f"A process may open {_limit()} files here, so the server holds {fitting} connections at once instead of "
        f"{_wanted()}; a higher hard limit (ulimit -Hn) lets it hold more."
    )


def connections_environment() -> dict[str, str]:
    """Ray's variable for the connections that HAProxy takes; none where Ray's own number fits."""
    fitting = _fitting()
    return {} if fitting >= _wanted() else {_MAXCONN: str(fitting)}


def _wanted() -> int:
    return int(os.environ.get(_MAXCONN, _RAYS_MAXCONN))


def _fitting() -> int:
    return max(1, (_limit() - _FILES_BESIDE_CONNECTIONS) * 2 // _FILES_OF_TWO_CONNECTIONS)


def _limit() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 2**31 if hard == resource.RLIM_INFINITY else hard
