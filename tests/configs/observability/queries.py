"""The queries of the alert rules and of the dashboard, and what of /metrics they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from configs.model_folder import PROJECT_ROOT

RULES = PROJECT_ROOT / "configs" / "prometheus" / "alerts.yaml"
DASHBOARD = PROJECT_ROOT / "configs" / "grafana" / "crosskv.json"
RATE_INTERVAL = "$__rate_interval"
"""Grafana's own variable."""

_SELECTOR = re.compile(r"\b((?:crosskv_|vllm:)\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
_GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")
_ROW = re.compile(r"^\| `(crosskv_\w+)(?:\{([\w,]+)\})?` \| .*?( \*Histogram\.\*)? \|$", re.MULTILINE)
_TEMPLATE = re.compile(r"\{\{\s*\$labels\.(\w+)")
_LEGEND = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class Selector:
    """A metric in a query, with the names of the labels by which the query chooses or groups it."""

    metric: str
    labels: frozenset[str]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def dashboard_queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def all_queries() -> list[str]:
    return [rule["expr"] for rule in rules()] + dashboard_queries()


def selectors(query: str) -> Iterator[Selector]:
    """Every metric that the query names, with the labels that it chooses or groups by; `le` is every histogram's."""
    grouped = {label.strip() for labels in _GROUPED.findall(query) for label in labels.split(",")} - {"le", ""}
    for metric, matchers in _SELECTOR.findall(query):
        yield Selector(metric, frozenset(grouped.union(_MATCHER.findall(matchers))))


def labels_in_texts(rule: dict[str, Any]) -> set[str]:
    """That a rule's annotations show."""
    return {label for text in rule["annotations"].values() for label in _TEMPLATE.findall(text)}


def labels_in_legend(target: dict[str, Any]) -> set[str]:
    return set(_LEGEND.findall(target["legendFormat"]))


def listed() -> dict[str, frozenset[str]]:
    """From the names that docs/guide/metrics.md says samples have, to the labels of each."""
    page = (PROJECT_ROOT / "docs" / "guide" / "metrics.md").read_text()
    found: dict[str, frozenset[str]] = {}
    for name, labels, histogram in _ROW.findall(page):
        ends = ("_bucket", "_sum", "_count") if histogram else ("",)
        found |= {f"{name}{end}": frozenset(filter(None, labels.split(","))) for end in ends}
    return found
