"""What a sparse prefix is, and where its segments' kept blocks lie: in the last slots, in order, each slot once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from deployments.engine.load_paths.sparse.prefix import SparsePrefix, first_slots, planned_prefix, why_not_prefix
from kvmanager.extensions.sparse.retained_prefixes import PlannedSparse
from kvmanager.moves.plan import PlannedLoad

LAYERS = 3
segments = st.lists(st.lists(st.integers(0, 4), min_size=LAYERS, max_size=LAYERS), min_size=1, max_size=5)


def planned(kept: list[list[int]], blocks: int = 4, **changes: Any) -> PlannedSparse:
    loads = [
        PlannedLoad(bytes([number]) * 32, number * blocks, blocks, "redis", "here", 1) for number in range(len(kept))
    ]
    whole: dict[str, Any] = {"loads": loads, "kept": kept, "forms": [b"f"] * len(kept), "digest": b"d", **changes}
    return PlannedSparse(**whole)


@given(segments)
def test_kept_blocks_fill_the_last_slots_in_order(kept: list[list[int]]) -> None:
    found = planned_prefix(planned(kept))
    for layer in range(LAYERS):
        slots = [
            slot
            for first, counts in zip(found.slots, kept, strict=True)
            for slot in range(first[layer], first[layer] + counts[layer])
        ]
        assert slots == list(range(found.prefix.shifts[layer], found.prefix.blocks))


@pytest.mark.parametrize(
    "plan",
    [
        planned([[1, 2, 5]]),
        planned([[1, 2, -1]]),
        planned([[1, 2, 3], [1, 2]]),
        replace(planned([[1, 2, 3]]), kept=()),
        planned([[1, 2, 3]], forms=[]),
        planned([[1, 2, 3], [1, 2, 3]], loads=planned([[1, 2, 3]]).loads),
        planned([[1, 2, 3]], loads=[planned([[1, 2, 3]]).loads[0]._replace(start_block=1)]),
        planned([[1, 2, 3]], loads=[planned([[1, 2, 3]]).loads[0]._replace(used_blocks=3)]),
        planned([]),
    ],
)
def test_a_plan_that_does_not_add_up_is_refused(plan: Any) -> None:
    with pytest.raises((ValueError, IndexError)):
        planned_prefix(plan)


def test_segments_that_keep_more_or_less_than_the_prefix_are_refused() -> None:
    with pytest.raises(ValueError, match="together"):
        first_slots(SparsePrefix(4, (2, 2)), [[1, 2], [2, 0]])


def test_a_prompt_is_longer_than_its_prefix_and_has_the_models_layers() -> None:
    prefix = SparsePrefix(4, (4, 2))
    assert why_not_prefix(prefix, 2, 32, 129) is None
    assert "last one" in (why_not_prefix(prefix, 2, 32, 128) or "")
    assert "layers" in (why_not_prefix(prefix, 3, 32, 129) or "")
