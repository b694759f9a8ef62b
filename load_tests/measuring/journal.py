"""Measured points as lines of JSON, written as they end: what an interrupted run leaves, and goes on from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar


class Point(Protocol):
    """A measurement that can be named."""

    @property
    def key(self) -> Any:
        """All that decides what is measured, as JSON knows it: equal keys are one measurement."""
        ...


P = TypeVar("P", bound=Point)


class Journal(Generic[P]):
    """The file and what it holds. Of two lines with one key the later one counts; one that was cut off is dropped."""

    def __init__(self, path: Path) -> None:
        """Read what is there. Raises OSError where the folder cannot be written to."""
        self.path = path
        self._entries: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8") as file:
            file.seek(0)
            text = file.read()
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._entries[_name(entry["key"])] = entry
            except (ValueError, KeyError, TypeError):
                continue  # the line that was being written when the run was killed
        if text and not text.endswith("\n"):
            self._rewrite()

    def add(self, point: P, **found: Any) -> None:
        """Keep what was found at a point, on the disk too."""
        entry = {"key": point.key, **found}
        line = json.dumps(entry)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._entries[_name(point.key)] = json.loads(line)

    def has(self, point: P) -> bool:
        """Whether the point was measured."""
        return _name(point.key) in self._entries

    def of(self, points: Iterable[P]) -> list[dict[str, Any]]:
        """The entries of those points that were measured, in their order: what `add` was given, and `key`."""
        return [self._entries[_name(point.key)] for point in points if self.has(point)]

    def missing(self, points: Iterable[P]) -> list[P]:
        """Those that are not measured yet."""
        return [point for point in points if not self.has(point)]

    def forget(self, points: Iterable[P]) -> None:
        """Drop these points, to measure them again."""
        for point in points:
            self._entries.pop(_name(point.key), None)
        self._rewrite()

    def _rewrite(self) -> None:
        self.path.write_text("".join(json.dumps(entry) + "\n" for entry in self._entries.values()), encoding="utf-8")


def _name(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
