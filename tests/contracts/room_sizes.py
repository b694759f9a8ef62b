"""Prints the largest rooms and files: `python tests/contracts/room_sizes.py`. Size is a hint, not a rule."""

from __future__ import annotations

from collections import Counter

from source_imports import PACKAGES, ROOT, source_files

SHOWN = 15


def sizes() -> tuple[Counter[str], Counter[str]]:
    """Modules of each folder, and lines of each file, by path."""
    files = [path for path in source_files(*PACKAGES, "tests") if path.name not in ("__init__.py", "conftest.py")]
    rooms = Counter(str(path.parent.relative_to(ROOT)) for path in files)
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    return rooms, Counter(lines)


if __name__ == "__main__":
    for title, counts in zip(("modules", "lines"), sizes(), strict=True):
        for path, count in counts.most_common(SHOWN):
            print(f"{count:6} {title:8} {path}")
