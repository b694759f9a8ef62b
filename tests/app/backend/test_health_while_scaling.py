"""/health where the number of replicas follows the load: what is on its way is not missing, what was lost is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.backend import parts_watch
from app.backend.parts_watch import PartsWatch, health_probe
from configs.settings import load_settings
from kvmanager.scaling.book import LAG_S


class Manager:
    async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        await asyncio.Event().wait()


def states(*steps: tuple[float, str, str, int | None], least: int = 1) -> list[str]:
    """What /health says of replicas: (seconds, those that live and report, those that Serve lists, its target)."""
    settings = load_settings({"replicas": {"min": least, "max": 4}})

    async def check() -> list[str]:
        living, listed, at = "", "", 0.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts_watch.time, "monotonic", lambda: at)
            watch = PartsWatch(Manager())  # type: ignore[arg-type]
            probe = health_probe(watch, lambda: frozenset(living), settings, lambda: len(listed))
            found = []
            for at, living, listed, target in steps:  # noqa: B007 (the probe reads them)
                replicas = {name: ("abcd".index(name), 0.0) for name in living}
                scaling = {} if target is None else {"target": target}
                watch.hear({"replicas": replicas, "cpu_tiers": ["node"], "redis": None, "scaling": scaling})
                report = await probe()
                found.append(report.parts["replicas"]["state"])
                assert report.parts["replicas"].get("wanted") == target
            watch._task.cancel()
        return found

    return asyncio.run(check())


def test_up_and_down_again_nothing_is_missing() -> None:
    assert set(
        states(
            (0.0, "a", "a", 1),
            (1.0, "a", "a", 2),  # Serve starts another
            (19.5, "a", "ab", 2),  # it has not introduced itself to the manager yet
            (20.0, "ab", "ab", 2),
            (21.0, "a", "a", 2),  # it has taken one away, and the manager has not heard of that yet
            (22.0, "a", "a", 1),
            (60.0, "a", "a", 1),
        )
    ) == {"ok"}


def test_one_that_dies_is_missing_until_it_is_replaced() -> None:
    assert states(
        (0.0, "abc", "abc", 3),
        (1.0, "ab", "abc", 3),
        (1.0 + LAG_S, "ab", "ab", 3),
        (20.0, "ab", "ab", 3),
        (30.0, "abd", "abd", 3),
    ) == ["ok", "ok", "1 of 3 missing", "1 of 3 missing", "ok"]


def test_below_the_least_some_are_missing_whoever_knows_what_is_wanted() -> None:
    assert states((0.0, "a", "a", None), (1.0, "a", "a", 2), (2.0, "ab", "ab", 2), least=2) == [
        "1 of 2 missing",
        "1 of 2 missing",
        "ok",
    ]


def test_where_the_manager_says_nothing_serves_list_counts() -> None:
    assert states(
        (0.0, "abc", "abc", None),
        (1.0, "ab", "abc", None),
        (1.0 + LAG_S, "ab", "abc", None),
        (2.0 + LAG_S, "ab", "ab", None),
    ) == ["ok", "ok", "1 of 3 missing", "ok"]
