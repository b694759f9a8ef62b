"""A stranger finds a file by its folder's name: rooms stay small, and so do files."""

from __future__ import annotations

from collections import Counter

from source_imports import PACKAGES, ROOT, source_files

MOST_MODULES = 15
MOST_LINES = 400


def test_no_room_has_more_modules_than_a_glance_takes_in() -> None:
    files = [path for path in source_files(*PACKAGES, "tests") if path.name not in ("__init__.py", "conftest.py")]
    rooms = Counter(str(path.parent.relative_to(ROOT)) for path in files)
    crowded = {room: count for room, count in rooms.items() if count > MOST_MODULES}
    assert crowded == {}, f"more than {MOST_MODULES} modules: a room for some of them has not been built yet"


def test_no_file_is_longer_than_the_wall() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in source_files(*PACKAGES, "tests")
    }
    long = {path: lines for path, lines in lengths.items() if lines > MOST_LINES}
    assert long == {}, f"more than {MOST_LINES} lines: a second concept has moved in"
