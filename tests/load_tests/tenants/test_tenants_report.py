"""Windows of two tenants' shares, and the sentences for targets that are missed; no server."""

from __future__ import annotations

import json

import pytest

from configs.settings import load_settings
from load_tests.tenants.load import Done
from load_tests.tenants.report import ALONE, BESIDE, HELD, NOT_HELD, ONE_TENANT, Found, Shares, modest, throughput
from load_tests.tenants.servers import KEYS, Scenario
from load_tests.tenants.shares import WINDOW_S, window_ratios


def steadily(cost: float, until: float) -> list[Done]:
    return [Done(float(at), 1.0, cost, 1) for at in range(int(until))]


def test_windows_are_compared_by_weight():
    served = {"a": steadily(20, 100), "b": steadily(10, 100)}
    ratios = window_ratios(served, {"a": 2.0}, 5.0, 100.0)
    assert len(ratios) == 100 - 5 - WINDOW_S + 1
    assert ratios == pytest.approx([1.0] * len(ratios))
    assert max(window_ratios(served, {}, 5.0, 100.0)) == pytest.approx(2.0)


def test_a_tenant_that_was_not_served_and_a_run_that_is_too_short_are_no_result():
    with pytest.raises(ValueError, match="b was not served"):
        window_ratios({"a": steadily(1, 99), "b": []}, {}, 0.0, 99.0)
    with pytest.raises(ValueError, match="no window"):
        window_ratios({"a": steadily(1, 9), "b": steadily(1, 9)}, {}, 0.0, 9.0)


def test_each_target_that_is_missed_has_a_sentence():
    fine = Found(
        Scenario(),
        modest({ALONE: [1.0], BESIDE: [1.2], ONE_TENANT: [9.0]}),
        throughput({NOT_HELD: [100.0], HELD: [99.0]}),
        [Shares(1.0, [0.95, 1.05])],
    )
    assert fine.misses == []
    assert "0.950 to 1.050" in fine.markdown()
    assert json.loads(json.dumps(fine.as_json()))["misses"] == []
    bad = Found(
        Scenario(),
        modest({ALONE: [1.0], BESIDE: [1.4], ONE_TENANT: [9.0]}),
        throughput({NOT_HELD: [100.0], HELD: [97.0]}),
        [Shares(2.0, [0.89, 1.0])],
    )
    assert len(bad.misses) == 3
    assert all(sentence in bad.markdown() for sentence in bad.misses)


def test_its_servers_can_be_started_with_these_settings():
    plan = Scenario()
    two, one = (load_settings(plan.settings(tenants, 2.0)) for tenants in (2, 1))
    assert two.http.tenants == ("a", "b")
    assert two.of_tenants("weight") == {"a": 2.0}
    assert one.http.tenants == ("a",)
    assert set(two.http.api_keys) == set(one.http.api_keys) == set(KEYS.values())
