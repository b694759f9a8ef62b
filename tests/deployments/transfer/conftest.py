"""An engine that loads layer by layer whatever it loads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from layer_port import LayerPort
from live_engine import LiveEngine


@pytest.fixture
def layerwise(engine: LiveEngine) -> Iterator[LiveEngine]:
    engine.port = LayerPort()
    engine.reuse.layerwise.choice.mode = "on"
    yield engine
    engine.reuse.layerwise.choice.mode = "off"
