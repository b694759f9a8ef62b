"""Whole segments that lie in memory, handed on layer group by layer group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from deployments.protocol.kv_port import LayerArrival


def group_ends(layers: int, per_group: int) -> list[int]:
    """The ends of groups of `per_group` layers, the last of which may be smaller."""
    return [*range(per_group, layers, per_group), layers]


def in_layer_groups(segments: Iterable[memoryview | None], ends: Sequence[int]) -> Iterator[LayerArrival]:
    """`KVPort.fetch_layers` of what `KVPort.fetch` yields, where nothing of it becomes invalid.

    The first group of each segment is handed on as soon as the segment is there, the further groups when all are.
    """
    arrived: list[memoryview] = []
    for number, sealed in enumerate(segments):
        yield LayerArrival(number, sealed, ends[0])
        if sealed is None:
            break
        arrived.append(sealed)
    for end in ends[1:]:
        for number, sealed in enumerate(arrived):
            yield LayerArrival(number, sealed, end)
