"""Prometheus families on their way from the part that counts to the ingress that shows them: objects, never text.

A family (`prometheus_client.Metric`) is plain data and can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.samples import Sample


def labelled(families: Iterable[Metric], **labels: str) -> list[Metric]:
    """The families with more labels at every sample: which replica, or node, says so."""
    more: list[Metric] = []
    for family in families:
        copy = Metric(family.name, family.documentation, family.type, family.unit)
        copy.samples = [sample._replace(labels={**sample.labels, **labels}) for sample in family.samples]
        more.append(copy)
    return more


def joined(families: Iterable[Metric]) -> list[Metric]:
    """A family that several parts have, once: as the first describes it, with the samples of all."""
    by_name: dict[str, Metric] = {}
    for family in families:
        known = by_name.get(family.name)
        if known is None:
            known = by_name[family.name] = Metric(family.name, family.documentation, family.type, family.unit)
        known.samples = [*known.samples, *family.samples]
    return list(by_name.values())


def added(families: Iterable[Metric]) -> list[Metric]:
    """The same; samples of one name and labels are one sample with the sum of their values."""
    together = joined(families)
    for family in together:
        by_place: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
        for sample in family.samples:
            place = sample.name, frozenset(sample.labels.items())
            before = by_place.get(place)
            by_place[place] = sample if before is None else before._replace(value=before.value + sample.value)
        family.samples = list(by_place.values())
    return together


class Families:
    """A collector of families that are there already, for `generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = joined(families)

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._families
