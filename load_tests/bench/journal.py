"""Measurements as lines of JSON, written as they end: what an interrupted run leaves, and goes on from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from load_tests.bench.figures import Figures
from load_tests.bench.plan import Key
from load_tests.harness.client import Measured


class Journal:
    """The file and what it holds. Of two lines with one key the later one counts."""

    def __init__(self, path: Path) -> None:
        """Read what is there. Raises OSError where the folder cannot be written to."""
        self.path = path
        self.figures: dict[Key, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+") as file:
            file.seek(0)
            for line in file:
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            entry = json.loads(line)
            self.figures[Key(**entry["key"])] = entry["figures"]
        except (ValueError, KeyError, TypeError):
            return  # the line that was being written when the run was killed

    def add(self, key: Key, figures: Figures, measured: Sequence[Measured]) -> None:
        """Keep a measurement, with every request for whoever wants other figures of them."""
        kept = figures.as_dict()
        entry = {"key": key.as_dict(), "figures": kept, "requests": [asdict(one) for one in measured]}
        text = self.path.read_text()
        with self.path.open("a") as file:
            file.write("\n" if text and not text.endswith("\n") else "")
            file.write(json.dumps(entry) + "\n")
        self.figures[key] = kept

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those that are not measured yet."""
        return [key for key in keys if key not in self.figures]

    def forget(self) -> None:
        """Begin anew."""
        self.path.write_text("")
        self.figures.clear()
