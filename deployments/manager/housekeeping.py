"""What the manager's actor does every second, whoever asks for what."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

EVERY_S = 1.0


async def keep_house(tidy: Callable[[float], None]) -> None:
    """Call `tidy` with the time of `time.monotonic` for ever; an error is logged, and the next turn comes."""
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            tidy(time.monotonic())
        except Exception:
            logger.exception("housekeeping failed")
