"""Where tests find promtool: on PATH, else in Debian's package `prometheus`, unpacked beside and not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest

from load_tests.harness.patience import patience
from tests.surroundings import outside

PATIENCE_S = 120.0
_WHERE = "install Debian's package `prometheus`, or put promtool on PATH"


def promtool_or_skip(folder: Path) -> Path:
    """promtool's path. `folder` is kept between runs. Skips, and warns, where none can be had.

    No root is needed: apt's lists and cache are those of `folder`, where the machine has none to give.
    """
    found = shutil.which("promtool")
    unpacked = folder / "usr" / "bin" / "promtool"
    if found is not None:
        return Path(found)
    if not unpacked.exists():
        why = _unpack(folder)
        if why is not None:
            message = f"the alert rules are NOT tested: no promtool ({why}); {_WHERE}"
            warnings.warn(message, stacklevel=2)
            pytest.skip(message)
    return unpacked


def _unpack(folder: Path) -> str | None:
    """Fetch the package and unpack it; returns why not."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "no apt-get here"
    own = {"Dir::State::lists": folder / "lists", "Dir::Cache": folder / "cache"}
    for path in own.values():
        (path / "partial").mkdir(parents=True, exist_ok=True)
    private = [part for name, path in own.items() for part in ("-o", f"{name}={path}")]
    attempts = ([["apt-get", "download", "prometheus"]], [
        ["apt-get", *private, "update"], ["apt-get", *private, "download", "prometheus"],
    ])  # fmt: skip
    said, limit_s = "", patience(PATIENCE_S)
    for commands in attempts:
        for command in commands:
            try:
                done = subprocess.run(
                    command, cwd=folder, capture_output=True, text=True, check=False, timeout=limit_s,
                    stdin=subprocess.DEVNULL, env=outside(os.environ) | {"DEBIAN_FRONTEND": "noninteractive"},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"`{' '.join(command)}` took more than {limit_s:.0f} s"
            said = (done.stderr.strip().splitlines() or [f"`{' '.join(command)}` failed"])[-1]
        packages = sorted(folder.glob("prometheus_*.deb"))
        if packages:
            subprocess.run(["dpkg-deb", "-x", packages[-1], folder], check=True, timeout=limit_s)
            return None
    return said
