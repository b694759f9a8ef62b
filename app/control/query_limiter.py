"""Holds apart what takes milliseconds of the manager: one query at a time, with a pause after each.

Of each tenant only a few wait. So a client in a loop takes no more of the manager than one that asks now and then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.gate.errors import OverloadedError

MOST_WAITING = 4
"""Calls of one tenant, or of its administrators."""
PAUSE_S = 0.05


class QueryLimiter:
    """One query at a time, of all tenants. On one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting: Counter[str] = Counter()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, and pause after it. Raises OverloadedError: too many of this tenant wait already."""
        if self._waiting[tenant] >= MOST_WAITING:
            raise OverloadedError("Questions of yours wait already. Please try again in a moment.")
        self._waiting[tenant] += 1
        try:
            async with self._lock:
                yield
                await asyncio.sleep(PAUSE_S)
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
