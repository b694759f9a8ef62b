"""What an engine listens on: its process group's sockets are this machine's own business."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from configs.settings import load_settings
from deployments.engine.engine_args import engine_environment
from load_tests.harness.patience import patience

LISTENERS = """
import psutil, torch.distributed as dist
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
found = psutil.Process().net_connections("tcp")
print("addresses", *{one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN})
"""


def other_interface() -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and not a.address.startswith("127.") for a in addresses):
            return name
    pytest.skip("this machine has no interface but loopback")


def test_an_engines_process_group_listens_on_loopback_whatever_the_hosts_name_means(model_folder: Path) -> None:
    # A host whose name means its address on the network, as in a container, would have this said by its resolver.
    elsewhere = os.environ | {"GLOO_SOCKET_IFNAME": other_interface()}
    environment = elsewhere | dict(engine_environment(load_settings({"model": str(model_folder)})))
    command = [sys.executable, "-c", LISTENERS]
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=patience(120)
    ).stdout
    addresses = printed.split()[1:]
    assert addresses
    assert all(address.startswith("127.") for address in addresses)
