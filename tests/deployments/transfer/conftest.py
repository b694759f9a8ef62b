"""An engine that loads layer by layer whatever it loads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from layer_port import LayerPort
from live_engine import PATIENCE_S, LiveEngine


@pytest.fixture
def layerwise(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveEngine]:
    engine.port = LayerPort()
    engine.reuse.layerwise.choice.mode = "on"
    monkeypatch.setattr(engine.scheduler.connector._scheduler_side, "_load_deadline_s", PATIENCE_S)
    yield engine
    engine.reuse.layerwise.choice.mode = "off"
