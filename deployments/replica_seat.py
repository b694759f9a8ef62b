"""A replica as the KV manager sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ReplicaSeat:
    """A registered replica: `rank` is its number in the debug header, `orders` what it has to do."""

    rank: int
    node_id: str
    last_seen: float
    orders: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
