"""What all sections of the settings tree are."""

from __future__ import annotations

import typing
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A section refuses what it does not know and does not change once loaded."""

    # pydantic's own messages quote what was given, which may be a password; `configs.errors` quotes what may be shown.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


def secret_fields(tree: type[BaseModel]) -> dict[str, Any]:
    """The fields below `tree` that are marked secret (`repr=False`): True by name, and by section what is in it.

    It is pydantic's `exclude`, too.
    """
    found: dict[str, Any] = {}
    for name, field in tree.model_fields.items():
        if not field.repr:
            found[name] = True
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inner = secret_fields(field.annotation)
            if inner:
                found[name] = inner
    return found


def section_of(field: FieldInfo) -> tuple[type[BaseModel] | None, str]:
    """The section that a field is, and nothing, or the section of each name in a mapping, and `NAME.`."""
    kind = field.annotation
    if typing.get_origin(kind) is dict and isinstance(kind := typing.get_args(kind)[1], type):
        return (kind, "NAME.") if issubclass(kind, BaseModel) else (None, "")
    return (kind, "") if isinstance(kind, type) and issubclass(kind, BaseModel) else (None, "")


def word_of_yaml(value: Any) -> Any:
    """A word that YAML takes for something else unless it is quoted: `on`, `off`, `75`."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if isinstance(value, int) else value
