"""Fault injection at the manager: a client whose calls are late, or whose answers are lost on their way back.

For tests of a running server (settings section `faults`); it wraps the client that is shipped, and does nothing else.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from configs.sections import FaultSettings
from deployments.manager_client import ManagerClient, ManagerUnavailableError


class FaultyManagerClient(ManagerClient):
    """See the module's docstring. A lost answer is one to a call that was carried out."""

    def __init__(self, app_name: str, delay_s: float, lost_share: float) -> None:
        super().__init__(app_name)
        self._delay_s = delay_s
        self._lost_share = lost_share
        self._random = random.Random()

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See `ManagerClient.ask`."""
        began = time.monotonic()
        await asyncio.sleep(min(self._delay_s, timeout_s))
        left_s = timeout_s - (time.monotonic() - began)
        if left_s <= 0:
            raise ManagerUnavailableError(f"injected: {method} took longer than {timeout_s} s")
        answer = await super().ask(method, *args, timeout_s=left_s)
        self._perhaps_lose(method)
        return answer

    def ask_blocking(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See `ManagerClient.ask_blocking`."""
        began = time.monotonic()
        time.sleep(min(self._delay_s, timeout_s))
        left_s = timeout_s - (time.monotonic() - began)
        if left_s <= 0:
            raise ManagerUnavailableError(f"injected: {method} took longer than {timeout_s} s")
        answer = super().ask_blocking(method, *args, timeout_s=left_s)
        self._perhaps_lose(method)
        return answer

    def _perhaps_lose(self, method: str) -> None:
        if self._random.random() < self._lost_share:
            raise ManagerUnavailableError(f"injected: the answer to {method} was lost")


def manager_client(app_name: str, faults: FaultSettings) -> ManagerClient:
    """The client of the manager, with the faults that the settings ask for, if any."""
    if faults.manager_delay_s or faults.manager_lost_share:
        return FaultyManagerClient(app_name, faults.manager_delay_s, faults.manager_lost_share)
    return ManagerClient(app_name)
