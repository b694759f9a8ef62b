"""Presets in YAML: settings that suit a model (configs/models/), and defaults that suit a use (configs/scenarios/).

A model's preset is laid *over* the configuration (`make serve MODEL=qwen3-8b`). A scenario lies *below* it: it decides
only settings that have no value yet (`scenario: rag`). No scenario sets whose prompts may be answered with loss
(`kv.fidelity`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

PRESETS = Path(__file__).resolve().parent / "models"
SCENARIOS = Path(__file__).resolve().parent / "scenarios"


def preset_names() -> list[str]:
    """The names that `MODEL=` takes, in order."""
    return _names(PRESETS)


def scenario_names() -> list[str]:
    """What `scenario` may be, in order."""
    return _names(SCENARIOS)


def find_preset(name: str) -> dict[str, Any] | None:
    """A model's preset by its file's name, in any case; None where there is none of that name."""
    wanted = name.lower()
    return _read(PRESETS, wanted) if wanted in preset_names() else None


def find_scenario(name: str) -> dict[str, Any] | None:
    """A scenario's defaults, a fragment of `args:`; None where there is none of exactly that name."""
    return _read(SCENARIOS, name) if name in scenario_names() else None


def require_scenario(name: str) -> None:
    """Raise ValueError, which names the scenarios there are, for an unknown one."""
    if name not in scenario_names():
        raise ValueError(f"there is no scenario {name!r}; use one of {', '.join(scenario_names())}, or leave it empty")


def with_scenario(given: Any) -> Any:
    """`args:` with what its scenario adds; as it is where it names none. What is no scenario is refused elsewhere."""
    name = given.get("scenario") if isinstance(given, Mapping) else None
    defaults = find_scenario(name) if isinstance(name, str) else None
    return given if defaults is None else below(given, defaults)


def below(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, with what it does not say taken from `defaults`, section by section. Neither is changed.

    A section may be given as an object of its class; what was set when that was made counts as said.
    """
    merged = dict(given)
    for name, default in defaults.items():
        if name not in merged:
            merged[name] = default
        elif isinstance(default, Mapping):
            mine = merged[name]
            said = mine.model_dump(exclude_unset=True) if isinstance(mine, BaseModel) else mine
            # Anything else in a section's place is wrong, and is refused as if there were no scenario.
            merged[name] = below(said, default) if isinstance(said, Mapping) else said
    return merged


@functools.cache
def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    return found
