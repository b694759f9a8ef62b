"""An engine in a process of its own, for all tests here that leave it alive: a start takes many seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_room import LiveRoom, until_gone


@pytest.fixture(scope="package")
def shared(demo_model: Path) -> Iterator[LiveRoom]:
    live = LiveRoom(demo_model)
    yield live
    process = live.process
    live.close()
    until_gone(process)


@pytest.fixture
def live(shared: LiveRoom) -> LiveRoom:
    """With nothing on the device."""
    shared.run(shared.room.carry_out({"kind": "clear_device"}))
    return shared
