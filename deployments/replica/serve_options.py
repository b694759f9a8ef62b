"""Serve's options in the processes of the two deployments: one event loop each, and gRPC between them.

Serve's own threads and Ray's tasks cost more than a short request itself does (docs/measured/overhead.md).
Ray's `RAY_SERVE_THROUGHPUT_OPTIMIZED` would set most of these, and others that are not wanted here.

Leans on Ray 2.60.0: `ray.serve._private.constants` reads each name from the environment while it is imported, so they
are set before a process starts. `tests/deployments/replica/test_serve_options.py` holds the names and what they do.
"""

from __future__ import annotations

from collections.abc import Mapping

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
