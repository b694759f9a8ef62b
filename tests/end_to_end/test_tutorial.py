"""The tutorial's commands do what its page shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import pytest

from load_tests.faults.catalogue import World
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer

sys.path.insert(0, str(Path(__file__).parent.parent / "docs"))  # importlib mode leaves other folders' modules alone

import tutorial

pytestmark = pytest.mark.server


def test_the_tutorials_commands_print_what_the_page_shows(world: World) -> None:
    shown = [block.shown for block in tutorial.blocks()]
    printed = world.server.in_time(lambda: played(world.server))
    assert [output if page else page for output, page in zip(printed, shown, strict=True)] == shown


def played(server: RunningServer) -> list[str]:
    """What each block prints to a reader who gives the copies to the tiers their moment."""
    printed: list[str] = []
    server.clear("device", "cpu", "redis")
    for output in tutorial.run(server.url):
        printed.append(output)
        if len(printed) > 1:  # the first block sends nothing
            server.wait_until(lambda: is_stored(server), "the prompt is in both shared tiers")
        server.wait_until_idle()
    return printed


def is_stored(server: RunningServer) -> bool:
    """Whether the CPU tier and Redis have all full blocks of the prompt."""
    answer = httpx.get(
        f"{server.url}/api/v1/kv/lookup", params={"messages": json.dumps(tutorial.MESSAGES)}, timeout=patience(60)
    )
    found = answer.raise_for_status().json()
    full = found["tokens"] // found["block_size_tokens"] * found["block_size_tokens"]
    return found["tokens_by_tier"]["cpu"] == found["tokens_by_tier"]["redis"] == full
