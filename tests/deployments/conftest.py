"""Fixtures of the deployments' tests; `live_engine.py` beside this file is made of `load_tests.harness.engine`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from configs.settings import PROJECT_ROOT

if TYPE_CHECKING:
    from live_engine import EngineSlot, LiveEngine


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the demo model, so that training it anew cannot change it under a running test."""
    return Path(shutil.copytree(PROJECT_ROOT / "models" / "demo", tmp_path_factory.mktemp("model") / "demo"))


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Files with an engine of their own come last, before them those that end the one that all others share."""
    ends, own = ({item.path for item in items if name in item.fixturenames} for name in ("mortal_engine", "own_engine"))
    items.sort(key=lambda item: (item.path in own, item.path in ends))


@pytest.fixture(scope="session")
def own_engine(one_engine: Any) -> Any:
    """`one_engine`, for files whose engine differs from that of `engine_slot`."""
    return one_engine


@pytest.fixture(scope="session")
def engine_slot(demo_model: Path, one_engine: Any) -> EngineSlot:
    from live_engine import EngineSlot

    return EngineSlot(demo_model, one_engine)


@pytest.fixture
def engine(engine_slot: EngineSlot) -> Iterator[LiveEngine]:
    """The float32 engine with an empty device and an empty port; after the test nothing may be left in it."""
    from load_tests.harness.memory_port import MemoryPort
    from load_tests.harness.patience import until

    live = engine_slot.get()
    live.port = MemoryPort()
    live.clear_device()
    yield live
    if not live.llm.errored:
        live.settle()
        until(lambda: live.blocks_in_use() == 0, "every device block is free")


@pytest.fixture
def mortal_engine(engine: LiveEngine) -> LiveEngine:
    """The shared engine, for a test that ends it."""
    return engine
