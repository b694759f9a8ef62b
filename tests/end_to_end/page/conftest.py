"""A browser before a real server."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "browser"))  # for modules that are no tests
