"""Where a replica's gRPC server is bound instead of to all addresses."""

from __future__ import annotations

import pytest

from deployments.replica import serve_process


@pytest.mark.parametrize(
    ("node", "asked", "bound"),
    [
        ("10.0.0.7", "[::]:0", "10.0.0.7:0"),
        ("2001:db8::7", "[::]:5001", "[2001:db8::7]:5001"),
        ("10.0.0.7", "127.0.0.1:5001", "127.0.0.1:5001"),
    ],
)
def test_all_addresses_become_the_nodes_own(node: str, asked: str, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(serve_process, "get_node_ip_address", lambda: node)
    monkeypatch.setattr(serve_process, "add_port_to_grpc_server", lambda server, address: given.append(address))
    serve_process._add_port(None, asked)
    assert given == [bound]
