"""What is refused of a Ray cluster before anything is built in it."""

from __future__ import annotations

import pytest

from app.cluster_checks import Cluster

GIB = 1024**3


def test_a_cluster_that_asks_for_no_token_is_refused_beyond_loopback() -> None:
    refusal = Cluster({"192.0.2.2": 2 * GIB}, has_token=False).refusal(GIB)
    assert refusal is not None
    assert "192.0.2.2" in refusal
    assert "RAY_AUTH_MODE=token" in refusal
    assert Cluster({"192.0.2.2": 2 * GIB}, has_token=True).refusal(GIB) is None


@pytest.mark.parametrize(
    ("address", "alone"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("2001:db8::2", False), ("a-name.example", False)],
)
def test_only_what_no_other_machine_reaches_needs_no_token(address: str, alone: bool) -> None:
    assert (Cluster({address: 2 * GIB}, has_token=False).refusal(GIB) is None) is alone


def test_a_node_whose_store_cannot_hold_the_tier_is_named() -> None:
    refusal = Cluster({"192.0.2.2": 2 * GIB, "192.0.2.3": 60_000_000}, has_token=True).refusal(GIB)
    assert refusal is not None
    assert "192.0.2.3" in refusal
    assert "at most 48000000" in refusal


def test_one_machine_that_is_reached_from_others_is_told_how_not_to_be() -> None:
    warning = Cluster({"192.0.2.2": GIB}, has_token=True).warning()
    assert warning is not None
    assert "`make serve`" in warning
    assert Cluster({"127.0.0.1": GIB}, has_token=True).warning() is None
    assert Cluster({"192.0.2.2": GIB, "192.0.2.3": GIB}, has_token=True).warning() is None
