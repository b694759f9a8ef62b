"""A piece of advice, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from app.cli.doctor.figures import Figures


class Severity(Enum):
    """How much it matters."""

    """It does not work as it is set."""
    WARNING = "warning"
    """It costs time or room."""
    INFO = "info"
    """It may gain something; a person has to judge."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to change. All of it is one line of text each, made here of numbers and of settings' values."""

    name: str
    severity: Severity
    evidence: str
    """The figures that were seen."""
    setting: str
    """The dotted name of the setting to change, as docs/guide/settings.md has it; empty: clients change."""
    value: str
    """What to set it to, or what to do."""
    why: str
    page: str
    """Where the documentation says more: `docs/….md#section`."""
    also: Mapping[str, str] = field(default_factory=dict)
    """What has to be set with it, by dotted name: without these a server would not start."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`advise` answers None where there is nothing to say. `needs_traffic`: it is not called on too little of it."""

    advise: Callable[[Figures], Advice | None]
    needs_traffic: bool

    @property
    def name(self) -> str:
        """The advice's name."""
        return self.advise.__name__.replace("_", "-")
