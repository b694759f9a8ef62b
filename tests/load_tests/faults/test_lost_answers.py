"""Answers that are lost were carried out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.protocol.manager_client import ManagerUnavailableError
from load_tests.faults.lost_answers import lose_answers


class Client:
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask(self, method: str, *args: Any, timeout_s: float) -> str:
        self.asked.append(method)
        return "answer"

    def ask_blocking(self, method: str, *args: Any, timeout_s: float) -> str:
        self.asked.append(method)
        return "answer"


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 60, 140), (1.0, 200, 200)])
def test_a_share_of_the_answers_is_lost_after_the_calls_were_carried_out(share: float, least: int, most: int) -> None:
    client: Any = Client()
    lose_answers(client, share)
    lost = 0
    for _ in range(100):
        for call in (
            lambda: asyncio.run(client.ask("a", timeout_s=1.0)),
            lambda: client.ask_blocking("b", timeout_s=1),
        ):
            try:
                assert call() == "answer"
            except ManagerUnavailableError:
                lost += 1
    assert least <= lost <= most
    assert len(client.asked) == 200
