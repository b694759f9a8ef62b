"""docs/guide/settings.md is generated, complete, and up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from configs import document
from configs.errors import field_names
from configs.presets import scenario_names
from configs.settings import Settings


def test_the_page_is_up_to_date() -> None:
    assert document.main(["--check"]) == 0


def test_a_stale_page_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(document, "GUIDE", tmp_path)
    for name in ("settings.md", "scenarios.md"):
        document.main([])
        (tmp_path / name).write_text("old")
        assert document.main(["--check"]) == 1
        assert f"docs/guide/{name} is not up to date; run `python -m configs.document`" in capsys.readouterr().err
    assert document.main([]) == 0
    assert document.main(["--check"]) == 0


def test_every_setting_is_described_on_the_page() -> None:
    page = document.settings_page()
    sections = {name for name, field in Settings.model_fields.items() if _is_section(field.annotation)}
    for name in field_names(Settings):
        assert f"`{name}`" in page
    assert sections == {"engine", "kv", "http", "routing", "roles", "blending", "scaling"}
    assert "| None |" not in page
    assert "Undefined" not in page, "a setting without a default is required"


def test_every_scenario_and_all_it_sets_is_on_the_page() -> None:
    page = document.scenarios_page()
    for name in scenario_names():
        assert re.search(rf"^\| `{name}` \| [A-Z]", page, re.MULTILINE), name
    assert "| `kv.save_answers` | `auto` | `never` | `always` |" in page
    assert "| `kv.layerwise.enabled` | `auto` | `off` |  | `on` | `on` |" in page


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
