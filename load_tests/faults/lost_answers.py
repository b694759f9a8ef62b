"""A client of the manager whose calls are carried out, and whose answers are lost on their way back."""

from __future__ import annotations

import random
from typing import Any

from deployments.protocol.manager_client import ManagerClient, ManagerUnavailableError


def lose_answers(client: ManagerClient, share: float) -> None:
    """Lose this share (0..1) of the answers that `client` gets from now on, for all that use it."""
    there: Any = client
    ask, ask_blocking = client.ask, client.ask_blocking
    drawn = random.Random()

    def perhaps_lose(method: str) -> None:
        if drawn.random() < share:
            raise ManagerUnavailableError(f"injected: the answer to {method} was lost")

    async def ask_and_lose(method: str, *args: Any, **how: Any) -> Any:
        answer = await ask(method, *args, **how)
        perhaps_lose(method)
        return answer

    def ask_blocking_and_lose(method: str, *args: Any, **how: Any) -> Any:
        answer = ask_blocking(method, *args, **how)
        perhaps_lose(method)
        return answer

    there.ask, there.ask_blocking = ask_and_lose, ask_blocking_and_lose
