"""What the server writes lies in `.crosskv`, or where a variable says: its paths move along."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.model_folder import PROJECT_ROOT
from configs.own_folder import OWN_FOLDER_VARIABLE, own_folder
from configs.settings import load_settings


@pytest.mark.parametrize("told", [None, ""])
def test_it_lies_in_the_project(monkeypatch: pytest.MonkeyPatch, told: str | None) -> None:
    monkeypatch.delenv(OWN_FOLDER_VARIABLE, raising=False)
    if told is not None:
        monkeypatch.setenv(OWN_FOLDER_VARIABLE, told)
    assert own_folder() == PROJECT_ROOT / ".crosskv"


def test_the_variable_moves_it_with_all_that_lies_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(OWN_FOLDER_VARIABLE, str(tmp_path))
    kv = load_settings({}).kv
    assert (own_folder(), kv.redis_folder_path, kv.codec_profiles_path) == (
        tmp_path,
        tmp_path / "redis",
        tmp_path / "profiles",
    )


def test_a_folder_that_was_chosen_stays_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(OWN_FOLDER_VARIABLE, str(tmp_path))
    kv = load_settings({"kv": {"redis_folder": "data"}}).kv
    assert kv.redis_folder_path == PROJECT_ROOT / "data"


def test_a_relative_path_begins_at_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OWN_FOLDER_VARIABLE, "../state")
    assert own_folder() == PROJECT_ROOT.parent / "state"
