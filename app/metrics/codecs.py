"""What coding segments for Redis saves and takes, from the CPU tiers' reports
(`deployments.segment_store.codec_meter`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from deployments.segment_store.codec_meter import BUCKETS_S
from kvmanager.segments.format import RAW

_LABELS = ["codec", "node"]
_ENDS = [*(f"{end:g}" for end in BUCKETS_S), "+Inf"]
_RATIO_TEXT = (
    "Bytes of segments in memory over their bytes in Redis, of all that a node has written; `raw` is 1. "
    "NaN: none was written with the codec."
)


def codec_families(nodes: Mapping[str, Any]) -> Iterator[Metric]:
    """The metric families, of what `nodes` report by codec. A node's report that is none is left out."""
    ratio = GaugeMetricFamily("crosskv_compression_ratio", _RATIO_TEXT, labels=_LABELS)
    encoding = HistogramMetricFamily(
        "crosskv_compression_duration_seconds", "Encoding a segment for Redis.", labels=_LABELS
    )
    decoding = HistogramMetricFamily(
        "crosskv_decompression_duration_seconds", "Decoding a segment from Redis.", labels=_LABELS
    )
    for node, codecs in nodes.items():
        for codec, counts in codecs.items() if isinstance(codecs, Mapping) else ():
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version
                labels = [str(codec), node]
                histograms = [_histogram(counts[what]) for what in ("encoding", "decoding")]
                ratio.add_metric(labels, _ratio(str(codec), counts["raw_bytes"], counts["coded_bytes"]))
                encoding.add_metric(labels, *histograms[0])
                decoding.add_metric(labels, *histograms[1])
    yield from (ratio, encoding, decoding)


def _ratio(codec: str, raw_bytes: int, coded_bytes: int) -> float:
    if codec == RAW:  # whether there is a segment yet or not
        return 1.0
    return raw_bytes / coded_bytes if coded_bytes else math.nan


def _histogram(durations: Mapping[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets, and the sum."""
    counts = map(float, accumulate(durations["buckets"]))
    return list(zip(_ENDS, counts, strict=True)), float(durations["total_s"])
