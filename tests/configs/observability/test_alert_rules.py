"""Alert rules and the dashboard name what the server has, and the rules fire when they have to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from load_tests.harness.patience import patience

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves the modules beside tests unimportable

import queries
from promtool import promtool_or_skip

TESTS = queries.RULES.with_name("alerts_test.yaml")
CONFIG = queries.RULES.with_name("prometheus.yaml")


@pytest.fixture(scope="session")
def promtool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prometheus' own checker: the machine's, or Debian's, unpacked into pytest's cache where this run has one."""
    cache = getattr(request.config, "cache", None)
    return promtool_or_skip(cache.mkdir("promtool") if cache else tmp_path_factory.mktemp("promtool"))


@pytest.mark.parametrize("query", queries.all_queries())
def test_a_query_names_metrics_and_labels_that_there_are(query: str) -> None:
    known = queries.listed()
    ours = [one for one in queries.selectors(query) if one.metric.startswith("crosskv_")]
    assert {one.metric for one in ours} <= known.keys()
    # `or`, `unless` and sums put metrics of different labels side by side: each label is one of them
    labels = frozenset().union(*(known[one.metric] for one in ours))
    assert {label for one in ours for label in one.labels} <= labels


def test_there_are_rules_and_panels() -> None:
    assert len(queries.rules()) >= 9
    assert len(queries.dashboard_queries()) >= 30


@pytest.mark.parametrize("rule", queries.rules(), ids=lambda rule: rule["alert"])
def test_a_rule_says_what_is_wrong_and_where_to_look(rule: dict) -> None:
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}
    known = queries.listed()
    of_the_query = {"instance"}.union(*(known.get(one.metric, ()) for one in queries.selectors(rule["expr"])))
    assert queries.labels_in_texts(rule) <= of_the_query


def test_a_legend_shows_labels_that_its_query_keeps() -> None:
    known = queries.listed()
    for panel in queries.panels():
        for target in panel["targets"]:
            found = list(queries.selectors(target["expr"]))
            kept = {label for one in found for label in one.labels | known.get(one.metric, frozenset())}
            assert queries.labels_in_legend(target) <= kept, panel["title"]


def test_every_alert_is_seen_firing_in_promtools_tests() -> None:
    text = TESTS.read_text()
    names = {rule["alert"] for rule in queries.rules()}
    assert {name for name in names if f'alertname="{name}"' not in text} == set()
    assert yaml.safe_load(text)["rule_files"] == [queries.RULES.name]


def run(*command: str | Path) -> None:
    done = subprocess.run(
        command, cwd=queries.RULES.parent, capture_output=True, text=True, check=False, timeout=patience(120)
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_the_configuration_sound_and_the_alerts_as_tested(promtool: Path) -> None:
    run(promtool, "check", "config", CONFIG.name)
    run(promtool, "test", "rules", TESTS.name)


def test_promtool_can_read_every_query_of_the_dashboard(promtool: Path, tmp_path: Path) -> None:
    """As the expressions of recording rules, which is where promtool parses any."""
    exprs = [query.replace(queries.RATE_INTERVAL, "1m") for query in queries.dashboard_queries()]
    rules = [{"record": f"query:{number}", "expr": expr} for number, expr in enumerate(exprs)]
    (tmp_path / "dashboard.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(promtool, "check", "rules", tmp_path / "dashboard.yaml")


def test_the_checks_see_what_they_are_for() -> None:
    (one,) = queries.selectors('sum by (tier, le) (rate(crosskv_no_such_total{kind=~"a.+",node!="b"}[5m]))')
    assert one == queries.Selector("crosskv_no_such_total", frozenset({"tier", "kind", "node"}))
    assert one.metric not in queries.listed()
