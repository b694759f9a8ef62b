"""A manager whose tiers answer when the machine lets them."""

from __future__ import annotations

import pytest

from deployments.manager import tier_registry
from load_tests.harness.patience import PATIENCE_S


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tier is late because the machine stands still; a test that wants a late one says so (`late_tiers`)."""
    monkeypatch.setattr(tier_registry, "ANSWER_S", PATIENCE_S)


@pytest.fixture
def late_tiers(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier is waited for 0.1 s."""
    monkeypatch.setattr(tier_registry, "ANSWER_S", 0.1)
