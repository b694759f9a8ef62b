"""The manager's benchmark at a small size: what it counts is there, and what falls short is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from load_tests.measuring import report
from load_tests.micro import manager_scale
from load_tests.micro.index_scale import PROMPT_SEGMENTS, CoreScale, prompts
from load_tests.micro.manager_rebuild import Rebuild
from load_tests.micro.manager_scale import REBUILDS, core_table, measure_core, missed

FINE = CoreScale(10**6, 0.2, 0.5, 0.2, 0.5, 0.01, 3.0, 3.0, 400.0, 8.0, 1e5, 500.0)
REBUILT = Rebuild(100_000, "Redis", 1.0, {"redis": 4.0}, 3.0, 50, 40, 3, 0, 2.0, 20.0)


def test_a_measured_index_has_the_size_that_was_asked_for() -> None:
    (row,) = measure_core([10_000])  # in a process of its own: in this one, memory that others gave back is used first
    assert row.segments == 10_000 // PROMPT_SEGMENTS * PROMPT_SEGMENTS
    assert 0 < row.plan_cpu_p50_ms <= row.plan_cpu_p99_ms
    assert row.bytes_per_segment > 100
    assert 8 <= row.bytes_per_block < 9
    assert all(value > 0 for value in (row.save_p50_ms, row.evict_ms, row.adopted_per_s, row.collection_ms))


def test_prompts_of_one_seed_are_the_same_in_every_process_and_share_nothing() -> None:
    first, second = (list(prompts(0, 300, 100)) for _ in range(2))
    assert first == second
    keys = [span.key for _, spans in first for span in spans]
    assert len(set(keys)) == len(keys) == 300


def test_the_table_says_how_much_the_largest_is_of_the_smallest() -> None:
    table = core_table([replace(FINE, segments=10**4, evict_ms=1.5), FINE])
    assert "| eviction of 1,000 segments | 1.5 ms | 3.0 ms | 2.00x |" in table.splitlines()


@pytest.mark.parametrize("name", list(manager_scale.TARGETS))
def test_what_falls_short_at_the_largest_size_is_said(name: str) -> None:
    short = replace(FINE, **{name: 2 * manager_scale.TARGETS[name]})
    small = replace(short, segments=10**4)
    assert missed([small, FINE], [REBUILT]) == []
    (sentence,) = missed([small, short], [])
    assert sentence.startswith(name)


def test_a_wrong_plan_and_a_slow_rebuild_are_said() -> None:
    wrong = replace(REBUILT, wrong_plans=1)
    slow = replace(REBUILT, full_after_first_plan_s=6.0)
    assert [len(missed([], [row])) for row in (REBUILT, wrong, slow)] == [0, 1, 1]
    assert "| Redis | 100,000 | 1.0 s | 4.0 s |" in report.rows(REBUILDS, [REBUILT])


@pytest.mark.parametrize("sizes", ["", "many", "10", "10000,-1"])
def test_a_size_that_cannot_be_measured_is_refused_before_anything_starts(sizes: str) -> None:
    app = typer.Typer()
    app.command()(manager_scale.main)
    result = CliRunner().invoke(app, ["--segments", sizes])
    assert result.exit_code == 2
    assert "from 10000" in " ".join(result.output.replace("│", " ").split())
