"""What the terminal says of a server that is ready."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.launch.plan import Overrides, make_plan
from app.launch.progress import ready_text
from tests.app.launch.stub_config import write_config

pytestmark = pytest.mark.usefixtures("each_processor")


def test_a_key_is_shown_on_a_terminal_and_in_no_log(tmp_path: Path, model_folder: Path) -> None:
    http = {"api_keys": {"the-secret-key": "acme"}}
    plan = make_plan(write_config(tmp_path, model_folder, http=http), Overrides())
    assert "Bearer the-secret-key" in ready_text(plan, 1.0, on_terminal=True)
    logged = ready_text(plan, 1.0, on_terminal=False)
    assert "the-secret-key" not in logged
    assert "Bearer YOUR_KEY" in logged
