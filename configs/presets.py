"""Presets: settings that suit one model, in configs/models/. `make serve MODEL=qwen3-8b` lays one over the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

PRESETS = Path(__file__).resolve().parent / "models"


def preset_names() -> list[str]:
    """The names that `MODEL=` takes, in order."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def find_preset(name: str) -> dict[str, Any] | None:
    """A preset's settings by its file's name, in any case; None where there is none of that name."""
    wanted = name.lower()
    if wanted not in preset_names():
        return None
    preset: dict[str, Any] = yaml.safe_load((PRESETS / f"{wanted}.yaml").read_text())
    return preset
