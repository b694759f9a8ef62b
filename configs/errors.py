"""One sentence for one wrong setting: it names the field and says what would work."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


class SettingsError(Exception):
    """A setting that cannot work. `str()` of it is one sentence for a person, without a traceback's help."""


def one_sentence(error: ValidationError, tree: type[BaseModel]) -> str:
    """The first problem of a pydantic error, in one sentence."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return _unknown_field(field, tree)
    if not field:  # a check across fields names them itself
        return _stop(_own_words(first))
    given = "" if isinstance(first["input"], dict) else f", not {first['input']!r}"
    if first["type"] == "value_error":
        return _stop(f"{field}: {_own_words(first)}")
    return _stop(f"{field}: {_lower(first['msg']).replace('input should be', 'it must be')}{given}")


def field_names(tree: type[BaseModel], prefix: str = "") -> list[str]:
    """Every setting's dotted name, depth first."""
    names = []
    for name, field in tree.model_fields.items():
        names.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            names += field_names(field.annotation, f"{prefix}{name}.")
    return names


def _unknown_field(field: str, tree: type[BaseModel]) -> str:
    known = field_names(tree)
    # The right name in the wrong section comes first, then the nearest spelling.
    last = field.rpartition(".")[2]
    near = [name for name in known if name.rpartition(".")[2] == last] or difflib.get_close_matches(
        field, known, 1, 0.5
    )
    near = near or [
        name for name in known if name.rpartition(".")[2] in difflib.get_close_matches(last, _leaves(known), 1)
    ]
    hint = f"did you mean {near[0]!r}?" if near else "docs/settings.md lists the settings."
    return f"{field}: there is no such setting; {hint}"


def _leaves(names: list[str]) -> list[str]:
    return [name.rpartition(".")[2] for name in names]


def _own_words(details: ErrorDetails) -> str:
    cause: Any = details.get("ctx", {}).get("error")
    return str(cause) if cause is not None else details["msg"]


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _stop(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else text + "."
