"""Which load paths an engine has, by its settings. Nothing is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from configs.settings import load_settings
from deployments.engine.load_paths import parts


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(parts, "import_module", lambda module: SimpleNamespace(build=lambda _: module))

    def built(**kv: Any) -> list[str]:
        groups = SimpleNamespace(has_layers_alone=True)
        settings = load_settings({"kv": kv})
        made: Any = SimpleNamespace(settings=settings, states=None, ranks=1, groups=groups, whole="whole")
        return list(parts.build_paths(made))

    return built


def test_layerwise_loads_are_there_unless_they_are_off(paths: Any) -> None:
    assert paths() == ["sparse", "blend", "preempted", "layerwise", "whole"]
    assert paths(load_paths=[]) == ["layerwise", "whole"]
    assert paths(load_paths=["blend"], layerwise={"enabled": "off"}) == ["blend", "whole"]
