"""The benchmark of prompts that part: what its prompts share, who takes turns, and what its table says."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from load_tests.measuring.journal import Journal
from load_tests.micro.parted_prompts import (
    ARMS,
    CASES,
    DOCUMENT,
    LAST_MESSAGE,
    LONGEST,
    MIDDLES,
    NONE,
    OURS,
    OWN,
    QUESTIONS,
    RETURNS,
    TASKS,
    Cell,
    Spec,
    _cells,
    _compared,
    _sessions,
)


def prompts(load: str) -> list[list[list[int]]]:
    """By session."""
    found = _sessions(load, Random(1), 5)
    return [[[*one.text[:part], *tail] for part, tail in zip(one.kept, one.tails, strict=True)] for one in found]


@pytest.mark.parametrize("load", LAST_MESSAGE)
def test_prompts_of_one_session_begin_alike_and_all_fit(load: str) -> None:
    assert prompts(load) == prompts(load)
    for session, found in zip(_sessions(load, Random(1), 5), prompts(load), strict=True):
        assert len(found) == 1 + RETURNS
        for part, one in zip(session.kept[1:], found[1:], strict=True):
            end = min(part, len(session.text))
            assert one[:end] == found[0][:end]
            assert one[end : end + 10] != found[0][end : end + 10]
            assert len(one) < LONGEST - max(answer for _, answer in CASES)


def test_a_document_with_another_middle_is_as_long_as_the_document() -> None:
    for load in (QUESTIONS, TASKS, MIDDLES):
        lengths = [len(one) for found in prompts(load) for one in found]
        assert min(lengths) >= DOCUMENT[0] + LAST_MESSAGE[load][0]
        assert max(lengths) <= DOCUMENT[1] + LAST_MESSAGE[load][1]


def test_each_arm_has_one_turn_at_each_load_of_a_round() -> None:
    cells = _cells("windows", "small", 2)
    assert len(set(cells)) == len(cells)
    turns = [tuple(cell.arm for cell in cells[at : at + 2]) for at in range(0, 4 * len(CASES), 2)]
    assert [set(turn) for turn in turns] == [{OWN, OURS}] * 2 * len(CASES)
    assert len(set(turns)) == 2
    assert [cell.arm for cell in cells[4 * len(CASES) :]] == [NONE] * len(CASES)


def test_arms_differ_in_their_cache_alone() -> None:
    settings = {arm: Spec("states", "small", arm).settings("made/up") for arm in ARMS}
    assert [settings[arm].kv.enabled for arm in ARMS] == [arm != NONE for arm in ARMS]
    assert len({one.engine.model_dump_json() for one in settings.values()}) == 1
    assert [bool(settings[arm].kv.processor) for arm in ARMS] == [arm == OWN for arm in ARMS]


def test_the_line_has_the_ratio_and_what_was_reused_and_less_than_three_times_is_said(tmp_path: Path) -> None:
    journal: Journal[Cell] = Journal(tmp_path / "journal")
    for cell in _cells("windows", "small", 6):
        tokens = {"prompt": 400, "returning": 300, "reused": 150 * (cell.arm != NONE), "loaded": 0}
        if cell.arm == OURS:
            tokens |= {"reused": 270, "loaded": 90}
        speed = {NONE: 5.0, OWN: 10.0, OURS: 20.0}[cell.arm]
        journal.add(cell, tokens_per_s=speed, **tokens)
    compared, line = _compared("windows", "small", QUESTIONS, 4, journal)
    assert line[4] == "6"
    assert "**2.00**" in line[5]
    assert line[6:] == ["4.00", "4.00", "50%", "90%"]
    assert len(compared.misses()) == 1
