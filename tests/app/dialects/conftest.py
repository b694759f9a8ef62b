"""Makes the modules of this folder importable to its tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves the modules beside tests unimportable
