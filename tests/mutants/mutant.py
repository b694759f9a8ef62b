"""What a mutant is: a small fault, put into the code by replacing text, and the tests that must turn red."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


class LostPatternError(ValueError):
    """A mutant's text does not stand in its file exactly once, or what it makes of the file is no Python."""


@dataclass(frozen=True)
class Mutant:
    """One fault. Paths are relative to the project's root."""

    name: str
    file: str
    old: str
    """Text that stands in the file exactly once: a few whole lines or a part of one."""
    new: str
    """What takes its place. It runs: a fault that cannot be imported shows nothing."""
    tests: tuple[str, ...]
    """Node ids of a file or of a test in one. One of them must fail."""
    harm: str
    """What would go wrong for whom, in one sentence."""
    may_hang: bool = False
    """Whether a test that does not end within the limit counts as red."""

    @property
    def area(self) -> str:
        """Room of the file."""
        return str(PurePosixPath(self.file).parent)

    def applied(self, root: Path) -> str:
        """Return the file's text with the fault in it. Raises LostPatternError."""
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        found = text.count(self.old)
        if found != 1:
            raise LostPatternError(f"{self.name}: its text stands {found} times in {self.file}; follow the code")
        mutated = text.replace(self.old, self.new)
        try:
            fault_shows = ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))
        except SyntaxError as error:
            raise LostPatternError(f"{self.name}: {self.file} cannot be parsed with it: {error}") from None
        if not fault_shows:
            raise LostPatternError(f"{self.name}: {self.file} means the same with it")
        return mutated
