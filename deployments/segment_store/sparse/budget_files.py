"""Budgets of sparse KV on disk: `make profile-sparse` writes a model's next to its weights, and this reads them.

They belong to weights, and say whose by `codec_files.model_digest`: of other weights they would drop what those need.
The file is no part of the model's fingerprint (`deployments.engine.model_identity`): dense KV knows no budgets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.segment_store.codec_files import model_digest
from kvmanager.extensions.sparse.budgets import LAYERS, Budgets

BUDGETS_FILE = "crosskv_sparse.json"
KEPT_PROFILE_FILE = "crosskv_sparse.dat"
"""CacheGen's profile for what these budgets keep. Not `.bin`, which counts as weights."""
_MOST_BYTES = 1 << 20


def write_budgets(folder: Path, budgets: Budgets, measured: Mapping[str, Any], model: Path | None = None) -> Path:
    """Write a calibrated table and what was measured of it into a folder, mostly the ``model``'s; returns the file.

    Raises OSError.
    """
    path = folder / BUDGETS_FILE
    content = {
        "model": model_digest(str(model or folder)).hex(),
        "digest": budgets.digest.hex(),
        "eighths": [int(8 * share) for share in budgets.shares],
        "recent_tokens": budgets.recent,
        "measured": dict(measured),
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def find_budgets(model: str, level: str, layers: int) -> Budgets:
    """Return the budgets of a level for a model (a folder or a name) with `layers` layers.

    Raises ValueError, in a sentence that says what to do, where the level is `layers` and no file is the model's.
    """
    if level != LAYERS:
        return Budgets.uniform(level, layers)
    path = Path(model) / BUDGETS_FILE
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("it is far too large")
        content = json.loads(path.read_text(encoding="utf-8"))
        eighths, recent = content["eighths"], content["recent_tokens"]
        if not all(type(number) is int for number in (*eighths, recent)):
            raise ValueError("it has something else than whole eighths")
        budgets = Budgets.of_eighths(eighths, recent)
        if len(eighths) != layers:
            raise ValueError(f"it has {len(eighths)} layers, and the model {layers}")
        if content["model"] != model_digest(model).hex():
            raise ValueError("it was measured on other weights")
        if content["digest"] != budgets.digest.hex():
            raise ValueError("its digest is not that of its budgets")
    except FileNotFoundError:
        raise ValueError(_sentence(model, "the model has none")) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(_sentence(model, f"{path} cannot be used ({error})")) from None
    return budgets


def _sentence(model: str, why: str) -> str:
    return (
        f"sparse KV at level `{LAYERS}` needs budgets that were measured on the model, and {why}; "
        f"`make profile-sparse MODEL={model}` measures them, or take one of the levels 75, 50 and 20"
    )
