"""One sentence for one wrong setting: it names the field and says what would work."""

from __future__ import annotations

import difflib
import re
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from configs.removed import REMOVED
from configs.section import secret_fields, section_of

_REDIS_URL = re.compile(r"(rediss?|unix)://.*", re.IGNORECASE | re.DOTALL)
"""Anything may follow in a password, so all that follows is left out."""


class SettingsError(Exception):
    """A setting that cannot work. `str()` of it is one sentence for a person, without a traceback's help."""


def one_sentence(error: ValidationError, tree: type[BaseModel]) -> str:
    """The first problem of a pydantic error, in one sentence, without what is secret."""
    return _REDIS_URL.sub(r"\1://***.", _sentence(error, tree))


def _sentence(error: ValidationError, tree: type[BaseModel]) -> str:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    secret = _secret_place(path, secret_fields(tree))
    field = ".".join(path[: len(path) if secret is None else secret + 1])
    if first["type"] == "extra_forbidden":
        return _unknown_field(field, tree)
    if not field:  # a check across fields names them itself
        return _stop(_own_words(first))
    given = "" if secret is not None or isinstance(first["input"], dict) else f", not {first['input']!r}"
    if first["type"].startswith("byte_size"):
        return _stop(f"{field}: it must be a number of bytes or a size such as 512MiB or 1GiB{given}")
    if first["type"] == "value_error":
        return _stop(f"{field}: {_own_words(first)}")
    return _stop(f"{field}: {_lower(first['msg']).replace('input should be', 'it must be')}{given}")


def field_names(tree: type[BaseModel], prefix: str = "") -> list[str]:
    """Every setting's dotted name, depth first."""
    names = []
    for name, field in tree.model_fields.items():
        names.append(prefix + name)
        section, key = section_of(field)
        if section is not None:
            names += field_names(section, f"{prefix}{name}.{key}")
    return names


def _secret_place(path: list[str], secret: Any) -> int | None:
    """Which part of a field's path names a secret: its value is not shown, nor, where it is a mapping, its keys."""
    for place, part in enumerate(path):
        secret = secret.get(part) if isinstance(secret, dict) else None
        if secret is True:
            return place
    return None


def _unknown_field(field: str, tree: type[BaseModel]) -> str:
    if (instead := _what_replaces(field)) is not None:
        return f"{field}: {instead}"
    near = _nearest(field, field_names(tree))
    hint = f"did you mean {near!r}?" if near else "docs/guide/settings.md lists the settings."
    return f"{field}: there is no such setting; {hint}"


def _what_replaces(field: str) -> str | None:
    """What `REMOVED` says of a setting, by its own name, or in a mapping by any name in place of `NAME`."""
    for removed, instead in REMOVED.items():
        table, in_table, name = removed.partition(".NAME.")
        if field == removed or (in_table and field.startswith(f"{table}.") and field.endswith(f".{name}")):
            return instead
    return None


def _nearest(field: str, known: list[str]) -> str | None:
    """The right name in another section, else the nearest spelling of the whole name, else of its last part."""
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(known)}
    leaf = field.rpartition(".")[2]
    if leaf in by_leaf:
        return by_leaf[leaf]
    if whole := difflib.get_close_matches(field, known, 1, 0.7):
        return whole[0]
    leaves = difflib.get_close_matches(leaf, by_leaf, 1, 0.7)
    return by_leaf[leaves[0]] if leaves else None


def _own_words(details: ErrorDetails) -> str:
    cause: Any = details.get("ctx", {}).get("error")
    return str(cause) if cause is not None else details["msg"]


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _stop(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else text + "."
