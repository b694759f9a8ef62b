"""How Serve works in the processes of the two deployments: its options there, and where a replica listens for calls.

One event loop each, and gRPC between them. Serve's own threads and Ray's tasks cost more than a short request itself
does (docs/measured/overhead.md). Ray's `RAY_SERVE_THROUGHPUT_OPTIMIZED` would set most of these options, and others
that are not wanted here.

Leans on Ray 2.60.0: `ray.serve._private.constants` reads each name from the environment while it is imported, so they
are set before a process starts (`tests/deployments/replica/test_serve_options.py` holds the names and what they do);
`ray.serve._private.replica.add_port_to_grpc_server`, and the replica's constructor being called before the port is
opened (`tests/app/launch/test_launch.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica
from ray.util import get_node_ip_address

LONGEST_MESSAGE_BYTES = 2**31 - 1
"""gRPC's own limit is 4 MiB, which a long prompt, or logprobs of each of its tokens, may exceed. What a request may
ask for is bounded elsewhere; this is the most that gRPC can count."""

SERVE_OPTIONS: Mapping[str, str] = {
    # The deployment's code on the loop of the replica's actor, and a handle's router on its caller's: no hand-overs.
    # A constructor then keeps the loop while the model loads. Serve asks nothing of a replica before that has ended.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Calls of a handle as messages on one connection, instead of a task of Ray each and an object for each token.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(LONGEST_MESSAGE_BYTES),
    # Serve's log file gets a line per request, a hundred at a time: all are written in one go, on the event loop.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "100",
}
"""Environment variables."""

_EVERYWHERE = "[::]:"


def bind_to_node() -> None:
    """Let the gRPC server that Serve opens in a replica's process listen at the node's own address.

    Serve binds it to all of a machine's addresses, whatever Ray itself is bound to, and it carries out pickled calls.
    The callers look for it at the node's address: 127.0.0.1 on one machine. Call from a deployment's constructor, in
    the replica's process; more than once is as good as once.
    """
    replica.add_port_to_grpc_server = _add_port


def _add_port(server: Any, address: str) -> Any:
    if address.startswith(_EVERYWHERE):
        host = get_node_ip_address()
        address = f"{f'[{host}]' if ':' in host else host}:{address.removeprefix(_EVERYWHERE)}"
    return add_port_to_grpc_server(server, address)
