"""The manager's loop belongs to plans while a tier that was full gives up what Redis has."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from deployments.manager.redis_copies import Demoter


def test_what_a_tier_gives_up_is_ordered_in_parts_between_which_plans_are_made() -> None:
    happened: list[str] = []

    async def main() -> None:
        left = ["some", "more", "the rest"]
        tiers: Any = SimpleNamespace(redis_is_ready=True, send=happened.append)
        brain: Any = SimpleNamespace(
            relieve=lambda now: left.pop(0) if left else (), next_demotion=lambda now, most_bytes: None
        )

        async def plans() -> None:
            while "the rest" not in happened:
                await asyncio.sleep(0)
                happened.append("a plan")

        coming = asyncio.create_task(plans())
        await asyncio.sleep(0)
        Demoter(brain, tiers).wake()  # once
        await asyncio.wait_for(coming, 10)

    asyncio.run(main())
    ordered = [number for number, what in enumerate(happened) if what != "a plan"]
    assert [happened[number] for number in ordered] == ["some", "more", "the rest"]
    assert all("a plan" in happened[first:then] for first, then in pairwise(ordered))
