"""A model's budgets on disk: found again, and refused in words where they are another model's or none."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs.model_folder import PROJECT_ROOT
from deployments.engine.model_identity import weights_identity
from deployments.segment_store.codec_files import model_digest
from deployments.segment_store.sparse.budget_files import BUDGETS_FILE, KEPT_PROFILE_FILE, find_budgets, write_budgets
from kernels.codecs import CodecProfile
from kvmanager.extensions.sparse.budgets import Budgets

TABLE = Budgets.of_eighths([1, 8, 3], recent=5)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def rewritten(folder: Path, **changed: Any) -> None:
    path = folder / BUDGETS_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def test_what_is_written_is_found(model: Path) -> None:
    path = write_budgets(model, TABLE, {"kl": 0.001})
    assert find_budgets(str(model), "layers", 3) == TABLE
    assert json.loads(path.read_text())["digest"] == TABLE.digest.hex()


def test_what_is_measured_of_a_model_changes_neither_its_fingerprint_nor_its_digest(model: Path) -> None:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(model=str(model)))
    before = weights_identity(config), model_digest(str(model))
    write_budgets(model, TABLE, {})
    (model / KEPT_PROFILE_FILE).write_bytes(b"profile")
    (model / "crosskv_blend.json").write_text("{}")
    assert (weights_identity(config), model_digest(str(model))) == before
    (model / "other.json").write_text("{}")
    assert weights_identity(config) != before[0]


def test_uniform_levels_need_no_file(model: Path) -> None:
    assert find_budgets(str(model), "50", 3) == Budgets.uniform("50", 3)
    assert find_budgets("some/name", "20", 3) == Budgets.uniform("20", 3)


def test_a_model_without_budgets_is_told_how_to_get_them(model: Path) -> None:
    for folder in (str(model), "some/name"):
        with pytest.raises(ValueError, match=r"make profile-sparse MODEL=.* or take one of the levels"):
            find_budgets(folder, "layers", 3)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model": bytes(16).hex()}, "other weights"),
        ({"digest": bytes(16).hex()}, "digest is not"),
        ({"eighths": [1, 8, 4]}, "digest is not"),
        ({"recent_tokens": 4}, "digest is not"),
        ({"eighths": [1, 8]}, "2 layers, and the model 3"),
        ({"eighths": [0, 8, 3]}, "more than nothing"),
        ({"eighths": [1.0, 8, 3]}, "whole eighths"),
        ({"eighths": [True, 8, 3]}, "whole eighths"),
        ({"eighths": None}, "cannot be used"),
        ({"recent_tokens": "8"}, "whole eighths"),
    ],
)
def test_a_file_that_is_not_the_models_is_refused_in_words(model: Path, changed: dict[str, Any], says: str) -> None:
    write_budgets(model, TABLE, {})
    rewritten(model, **changed)
    with pytest.raises(ValueError, match=says):
        find_budgets(str(model), "layers", 3)


@pytest.mark.parametrize("content", ["", "[]", "nonsense", "null", "x" * (2 << 20)])
def test_any_content_is_read_or_refused(model: Path, content: str) -> None:
    (model / BUDGETS_FILE).write_text(content)
    with pytest.raises(ValueError, match="cannot be used"):
        find_budgets(str(model), "layers", 3)


def test_other_weights_make_the_budgets_anothers(model: Path) -> None:
    write_budgets(model, TABLE, {})
    (model / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ValueError, match="other weights"):
        find_budgets(str(model), "layers", 3)


def test_the_demo_model_has_budgets_and_a_profile_of_its_weights() -> None:
    demo = PROJECT_ROOT / "models" / "demo"
    budgets = find_budgets(str(demo), "layers", 6)
    assert sum(budgets.kept_blocks(layer, 8) for layer in range(6)) <= 0.43 * 6 * 8
    profile = CodecProfile.from_bytes((demo / KEPT_PROFILE_FILE).read_bytes())
    profile.check((6, 2, 64), model_digest(str(demo)))
