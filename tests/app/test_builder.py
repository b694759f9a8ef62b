"""The application that Serve gets of a settings file."""

from __future__ import annotations

from typing import Any

import pytest

from app.builder import build


def test_the_applications_own_node_chooses_the_type_for_all(
    each_processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.builder.check_cluster", lambda settings: None)
    ingress: Any = build({"kv": {"enabled": False}})._bound_deployment
    replica = ingress.init_args[2]._bound_deployment
    assert [part.init_args[0]["dtype"] for part in (ingress, replica)] == [each_processor] * 2
