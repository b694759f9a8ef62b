"""Tolerant KV of which each layer keeps a part: where that would make it smaller in Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.cli.doctor.advice import Severity
from app.cli.doctor.figures import Setup


def form_level_of(settings: Mapping[str, Any]) -> str | None:
    """Return the level of `Setup.form_level`, as the settings of `kv` have it."""
    level: str | None = settings.get("sparse")
    return level


def sparser(setup: Setup) -> tuple[Severity, str, str, str] | None:
    """Return a step that makes tolerant KV in Redis smaller: its gravity, setting and value, and why; None: done."""
    if setup.form_level != "off":
        return None
    why = "Of tolerant prompts, each layer then keeps what it attends to (measure it first: make profile-sparse)."
    return Severity.INFO, "kv.sparse", "layers", why
