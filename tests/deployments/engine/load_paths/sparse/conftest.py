"""The float32 engine with sparse prefixes, and a model of transformers that is told what to see."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

import pytest

if TYPE_CHECKING:
    from live_engine import LiveEngine
    from masked_reference import MaskedReference
    from sparse_asker import SparseAsker


@pytest.fixture(scope="session")
def reference(demo_model: Path) -> MaskedReference:
    from masked_reference import MaskedReference

    return MaskedReference(demo_model)


@pytest.fixture
def asker(engine: LiveEngine) -> Iterator[SparseAsker]:
    from sparse_asker import SparseAsker

    asker = SparseAsker(engine)
    yield asker
    engine.settle()
    assert not asker.entered(), "whoever has left is in no table"
    asker.close()
