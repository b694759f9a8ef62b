"""A small byte-level BPE with merges, chats in its tokens, and answers whose tokens nobody would cut like that."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from chats import Chats


@pytest.fixture(scope="session")
def chats() -> Chats:
    return Chats()
