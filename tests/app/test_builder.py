"""The application that Serve gets of a settings file."""

from __future__ import annotations

from typing import Any

import pytest

from app.builder import build
from tests.surroundings import PROCESSOR_KIND


def test_the_applications_own_node_chooses_the_type_for_all(
    each_processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.builder.check_cluster", lambda settings: None)
    ingress: Any = build({"kv": {"enabled": False}})._bound_deployment
    replica = ingress.init_args[2]._bound_deployment
    assert [part.init_args[0]["dtype"] for part in (ingress, replica)] == [each_processor] * 2


@pytest.mark.usefixtures("each_processor")
@pytest.mark.parametrize(("chosen", "processor"), [({}, PROCESSOR_KIND), ({"processor": "vec, AVX2"}, "vec, AVX2")])
def test_the_applications_own_node_chooses_the_kind_of_processor_whose_kv_all_share_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], processor: str
) -> None:
    monkeypatch.setattr("app.builder.check_cluster", lambda settings: None)
    ingress: Any = build({"kv": {"enabled": False, **chosen}})._bound_deployment
    replica = ingress.init_args[2]._bound_deployment
    assert [part.init_args[0]["kv"] for part in (ingress, replica)] == [{"enabled": False, "processor": processor}] * 2
