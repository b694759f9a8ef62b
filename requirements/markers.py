"""Reduces the markers of a universal lock file to the machines that crosskv runs on (`make lock`).

    python markers.py FILE

uv resolves for all systems at once. A package that none of `machines` needs is dropped, and so is the marker of one
all of them need.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from packaging.markers import Marker

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PATCHES = ("0", "99")
"""The first and the last: some packages are needed before a patch alone."""
ARCHITECTURES = ("x86_64", "aarch64")


def machines() -> list[dict[str, str]]:
    """What markers ask for, of Linux with CPython: each of `PYTHONS` on each of `ARCHITECTURES`."""
    linux = {"os_name": "posix", "platform_system": "Linux", "sys_platform": "linux"}
    cpython = {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    return [
        {
            **linux,
            **cpython,
            "platform_machine": architecture,
            "python_version": version,
            "python_full_version": f"{version}.{patch}",
        }
        for version, patch, architecture in itertools.product(PYTHONS, PATCHES, ARCHITECTURES)
    ]


def reduced(lock: str) -> str:
    """The text of the lock file, with fewer markers and packages."""
    lines, kept = [], True
    for line in lock.splitlines(keepends=True):
        if line[0].isalnum():
            pin, separator, marker = line.rstrip().removesuffix("\\").partition(" ; ")
            needed = [Marker(marker).evaluate(machine) for machine in machines()] if separator else [True]
            kept = any(needed)
            if all(needed):
                line = pin.rstrip() + "\n"
        if kept:
            lines.append(line)
    return "".join(lines)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(reduced(path.read_text(encoding="utf-8")), encoding="utf-8")
