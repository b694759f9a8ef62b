"""What all sections of the settings tree are."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section refuses what it does not know and does not change once loaded."""

    # pydantic's own messages quote what was given, which may be a password; `configs.errors` quotes what may be shown.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)
