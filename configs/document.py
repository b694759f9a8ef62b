"""Writes docs/guide/settings.md from the settings: `python -m configs.document`; with `--check` it only compares."""

from __future__ import annotations

import os
import re
import sys
import typing
from pathlib import Path

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from configs.model_folder import PROJECT_ROOT
from configs.settings import Settings

PAGE = PROJECT_ROOT / "docs" / "guide" / "settings.md"

_HEAD = """# Settings

Everything that can be set, below `args:` in `serve_config.yaml`. `make serve` checks all of it before anything
starts, and names a wrong setting in one sentence.

A name's ending is its unit. Sizes in bytes may carry one of their own, such as `512MiB`. A default that is *empty*
is chosen when the server starts; the last column says how. `python -m configs.document` writes this page from
`configs/`.
"""
_PAGE = re.compile(r"\b(docs/[\w/]+\.md)\b")
_PLAIN_BOUNDS = (None, 0, 1)
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def settings_page() -> str:
    """docs/guide/settings.md as it has to be."""
    return "\n".join([_HEAD, _table(Settings, ""), *_sections(Settings, "")])


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` say whether it is up to date."""
    page = settings_page()
    if arguments != ["--check"]:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page)
        return 0
    if PAGE.is_file() and PAGE.read_text() == page:
        return 0
    print(f"{PAGE.relative_to(PROJECT_ROOT)} is not up to date; run `python -m configs.document`.", file=sys.stderr)
    return 1


def _sections(tree: type[BaseModel], prefix: str) -> list[str]:
    """The heading and the table of every section below `tree`, and of the sections in them."""
    parts: list[str] = []
    for name, field in tree.model_fields.items():
        if _section(field):
            section = typing.cast(type[BaseModel], field.annotation)
            parts.append(f"## `{prefix}{name}`\n\n{field.description}\n")
            parts += [_table(section, f"{prefix}{name}."), *_sections(section, f"{prefix}{name}.")]
    return parts


def _table(tree: type[BaseModel], prefix: str) -> str:
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in tree.model_fields.items():
        if not _section(field):
            meaning = _PAGE.sub(_link, field.description or "")
            rows.append(f"| `{prefix}{name}` | {_default(field)} | {meaning}{_allowed(field)} |")
    return "\n".join(rows) + "\n"


def _link(match: re.Match[str]) -> str:
    path = os.path.relpath(PROJECT_ROOT / match[1], PAGE.parent)
    return f"[{Path(path).stem}]({path})"


def _section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


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
    value = field.get_default(call_default_factory=True)
    if value is None or value in ({}, []):
        return "empty"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable().replace('.0', '')}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
