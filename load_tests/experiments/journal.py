"""What was measured so far: one line of JSON for each point, so that a run that was interrupted goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from load_tests.experiments.experiment import Point, Row


@dataclass(frozen=True)
class Entry:
    """A measured point. `others_cores`: cores that other programs used meanwhile, None for a point that was computed;
    `ended`: date and time, ISO."""

    key: str
    rows: list[Row]
    others_cores: float | None
    ended: str


class Journal:
    """The entries of `path`, whose folder must be there. A line that is cut off, by a crash, is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, Entry] = {}
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            try:
                entry = Entry(**json.loads(line))
            except (ValueError, TypeError):
                continue
            self._entries[entry.key] = entry
        if text and not text.endswith("\n"):
            self._rewrite()

    def add(self, entry: Entry) -> None:
        """Keep it, on the disk too."""
        self._entries[entry.key] = entry
        with self.path.open("a") as stream:
            stream.write(json.dumps(asdict(entry)) + "\n")

    def of(self, points: Iterable[Point]) -> list[Entry]:
        """The entries of those points that were measured, in their order."""
        return [self._entries[point.key] for point in points if point.key in self._entries]

    def has(self, point: Point) -> bool:
        """Whether the point was measured."""
        return point.key in self._entries

    def forget(self, points: Iterable[Point]) -> None:
        """Drop these points, to measure them anew."""
        for point in points:
            self._entries.pop(point.key, None)
        self._rewrite()

    def _rewrite(self) -> None:
        self.path.write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in self._entries.values()))
