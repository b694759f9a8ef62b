"""Writes docs/guide/settings.md and scenarios.md from configs/: `python -m configs.document`.

With `--check` it only compares.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from configs.errors import field_names
from configs.model_folder import PROJECT_ROOT
from configs.presets import SCENARIOS, find_scenario, scenario_names
from configs.section import section_of
from configs.settings import Settings

GUIDE = PROJECT_ROOT / "docs" / "guide"

_HEAD = """# Settings

Everything that can be set, below `args:` in `serve_config.yaml`. `make serve` checks all of it before anything
starts, and names a wrong setting in one sentence.

A name's ending is its unit. Sizes in bytes may carry one of their own, such as `512MiB`. A default that is *empty*
is chosen when the server starts; the last column says how. `python -m configs.document` writes this page from
`configs/`.
"""
_SCENARIOS_HEAD = """# Scenarios

`scenario: rag` below `args:` in `serve_config.yaml`, or `make serve SCENARIO=rag`, says what a server is for. It
chooses defaults for compression, layerwise transfer, blending, retention and the scheduler; whatever you set yourself
stays. An exact prompt stays exact under each of them: codecs with loss, sparse KV and blending are for prompts that
[ask for them](../concepts/compression.md#who-decides).

The [journal](../measured/journal.md#scenarios) says what each one brought, and where it brought nothing.
`python -m configs.document` writes this page from `configs/scenarios/`.
"""
_PAGE = re.compile(r"\b(docs/[\w/]+\.md)\b")
_PLAIN_BOUNDS = (None, 0, 1)
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def settings_page() -> str:
    """docs/guide/settings.md as it has to be."""
    return "\n".join([_HEAD, _table(Settings, ""), *_sections(Settings, "")])


def scenarios_page() -> str:
    """docs/guide/scenarios.md as it has to be."""
    names = ["short", "chat", "long-document", "rag", "cross-node", "cost"]
    names += [name for name in scenario_names() if name not in names]
    chosen = {name: dict(_leaves(find_scenario(name) or {})) for name in names}
    uses = ["| scenario | for |", "|---|---|", *(f"| `{name}` | {_said(name)} |" for name in names)]
    table = [
        "| setting | default | " + " | ".join(f"`{name}`" for name in names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for setting in field_names(Settings):
        cells = [f"`{chosen[name][setting]}`" if setting in chosen[name] else "" for name in names]
        if any(cells):
            table.append(f"| `{setting}` | {_default(_field(setting))} | " + " | ".join(cells) + " |")
    return "\n".join(
        [_SCENARIOS_HEAD, *uses, "", "## What each one sets", "", *table, "", "An empty cell is the default.", ""]
    )


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` say whether they are up to date."""
    stale = 0
    for name, page in {"settings.md": settings_page(), "scenarios.md": scenarios_page()}.items():
        path = GUIDE / name
        if arguments != ["--check"]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(page, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != page:
            stale = 1
            print(f"docs/guide/{name} is not up to date; run `python -m configs.document`.", file=sys.stderr)
    return stale


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A fragment of `args:` as dotted names and values."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _said(scenario: str) -> str:
    """The words above a scenario's file."""
    lines = itertools.takewhile(
        lambda line: line.startswith("#"), (SCENARIOS / f"{scenario}.yaml").open(encoding="utf-8")
    )
    return " ".join(line.strip("# \n") for line in lines)


def _field(dotted: str) -> FieldInfo:
    tree: type[BaseModel] = Settings
    *sections, name = dotted.replace(".NAME.", ".").split(".")
    for section in sections:
        tree = typing.cast(type[BaseModel], section_of(tree.model_fields[section])[0])
    return tree.model_fields[name]


def _sections(tree: type[BaseModel], prefix: str) -> list[str]:
    """The heading and the table of every section below `tree`, and of the sections in them."""
    parts: list[str] = []
    for name, field in tree.model_fields.items():
        section, key = section_of(field)
        if section is not None:
            parts.append(f"## `{prefix}{name}`\n\n{field.description}\n")
            parts += [_table(section, f"{prefix}{name}.{key}"), *_sections(section, f"{prefix}{name}.{key}")]
    return parts


def _table(tree: type[BaseModel], prefix: str) -> str:
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in tree.model_fields.items():
        if section_of(field)[0] is None:
            meaning = _PAGE.sub(_link, field.description or "")
            rows.append(f"| `{prefix}{name}` | {_default(field)} | {meaning}{_allowed(field)} |")
    return "\n".join(rows) + "\n"


def _link(match: re.Match[str]) -> str:
    path = os.path.relpath(PROJECT_ROOT / match[1], GUIDE)
    return f"[{Path(path).stem}]({path})"


def _allowed(field: FieldInfo) -> str:
    """What may be set, as a sentence; nothing where the default and the unit show it."""
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in _SIGNS.items()
        if getattr(rule, name, None) not in _PLAIN_BOUNDS
    ]
    names = [f"`{value}`" for value in typing.get_args(field.annotation)] if _is_choice(field) else []
    if all(name in (field.description or "") for name in names):
        names = []
    allowed = ", ".join([*names, *bounds])
    return f" *{allowed}.*" if allowed else ""


def _is_choice(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is typing.Literal


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ({}, []):
        return "empty"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable().replace('.0', '')}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
