"""Where the gRPC server listens that Serve opens in each of its replicas' processes.

Serve binds it to all of a machine's addresses, whatever Ray itself is bound to, and it carries out pickled calls. This
binds it to the node's own address, where the callers look for it: 127.0.0.1 on one machine.

Of Ray this leans on `ray.serve._private.replica.add_port_to_grpc_server`, and on the replica's constructor being
called before the port is opened; `tests/app/launch/test_launch.py` holds both.
"""

from __future__ import annotations

from typing import Any

from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica
from ray.util import get_node_ip_address

_EVERYWHERE = "[::]:"


def bind_to_node() -> None:
    """Call from a deployment's constructor, in the replica's process; more than once is as good as once."""
    replica.add_port_to_grpc_server = _add_port


def _add_port(server: Any, address: str) -> Any:
    if address.startswith(_EVERYWHERE):
        host = get_node_ip_address()
        address = f"{f'[{host}]' if ':' in host else host}:{address.removeprefix(_EVERYWHERE)}"
    return add_port_to_grpc_server(server, address)
