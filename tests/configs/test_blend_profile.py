"""A blending calibration beside the weights is read; what is broken is warned about once and counts as none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs import blending
from configs.blending import BLEND_PROFILE_FILE, BlendProfile, read_blend_profile

GOOD = {"check_layer": 2, "recompute_ratio": 0.1, "kl": 0.0007, "prompts": 32, "seed": 0, "versions": {"torch": "2"}}


def write(folder: Path, content: object) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / BLEND_PROFILE_FILE).write_text(text)
    return folder


def test_what_was_written_is_read(tmp_path: Path) -> None:
    profile = BlendProfile(**GOOD)
    write(tmp_path, profile.model_dump_json())
    assert read_blend_profile(tmp_path) == profile
    assert (profile.check_layer, profile.recompute_ratio) == (2, 0.1)


def test_fields_of_a_later_version_are_no_fault(tmp_path: Path) -> None:
    found = read_blend_profile(write(tmp_path, GOOD | {"later": True}))
    assert found is not None
    assert found.check_layer == 2


def test_a_model_without_one_has_none_and_nothing_is_said(tmp_path: Path, own_records: Any) -> None:
    assert read_blend_profile(tmp_path) is None
    assert read_blend_profile("nobody/has-this-model") is None
    assert own_records() == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "EOF"),
        ("[1, 2]", "object"),
        ("{" * 5000, "key must be"),
        (GOOD | {"check_layer": 0}, "check_layer"),
        (GOOD | {"check_layer": "2"}, "check_layer"),
        (GOOD | {"check_layer": True}, "check_layer"),
        (GOOD | {"recompute_ratio": 1.5}, "recompute_ratio"),
        (json.dumps(GOOD).replace("0.1,", "NaN,"), "recompute_ratio"),
        (GOOD | {"kl": -1}, "kl"),
        (GOOD | {"prompts": 0}, "prompts"),
        ({"check_layer": 2}, "recompute_ratio"),
        ("x" * 70_000, "too large"),
    ],
)
def test_a_broken_one_is_warned_about_once_and_counts_as_none(
    tmp_path: Path, own_records: Any, content: object, says: str
) -> None:
    assert read_blend_profile(write(tmp_path, content)) is None
    (record,) = own_records()
    assert says in record.getMessage()
    assert "make profile-blend" in record.getMessage()


def test_one_that_is_a_folder_is_warned_about(tmp_path: Path, own_records: Any) -> None:
    (tmp_path / BLEND_PROFILE_FILE).mkdir()
    assert read_blend_profile(tmp_path) is None
    assert len(own_records()) == 1


def test_a_hub_models_lies_in_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write(snapshot, GOOD)
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        lambda model, name, revision=None: str(snapshot / name) if revision == "abc" else None,
    )
    assert read_blend_profile("some/model", revision="abc") is not None
    assert blending.profile_folder("some/model", "other") is None
