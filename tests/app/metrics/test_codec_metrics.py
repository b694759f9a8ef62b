"""What coding saves and takes: counted in workers, added up by their node, shown as Prometheus text."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from app.metrics.manager import manager_families
from deployments.cpu_tier import actor
from deployments.cpu_tier.actor import CodecReports
from deployments.segment_store.codec_meter import CodecMeter, added_up
from deployments.segment_store.segment_codecs import RAW_CODING, Coding, FormLevel

NODE = "0123456789abcdef"


def metered(raw: int = 100, coded: int = 50, codec: str = "lossless") -> CodecMeter:
    meter = CodecMeter()
    meter.encoded(codec, raw, coded, 0.003)
    meter.decoded(codec, 0.0004)
    meter.decoded(codec, 9.0)
    return meter


def samples(codecs: Any) -> dict[str, float]:
    return {
        f"{sample.name} {sample.labels.get('codec')} {sample.labels.get('le', '')}".strip(): sample.value
        for family in manager_families({"cpu_tiers": {NODE: {"codecs": codecs}}})
        for sample in family.samples
    }


def test_ratio_and_durations_are_shown_by_codec() -> None:
    found = samples(metered().report() | metered(60, 10, "cachegen").report())
    assert found["crosskv_compression_ratio lossless"] == 2
    assert found["crosskv_compression_ratio cachegen"] == 6
    assert found["crosskv_compression_duration_seconds_count lossless"] == 1
    assert found["crosskv_compression_duration_seconds_sum lossless"] == pytest.approx(0.003)
    assert found["crosskv_compression_duration_seconds_bucket lossless 0.0025"] == 0
    assert found["crosskv_compression_duration_seconds_bucket lossless 0.005"] == 1
    assert found["crosskv_decompression_duration_seconds_bucket cachegen 0.0005"] == 1
    assert found["crosskv_decompression_duration_seconds_bucket cachegen 2.5"] == 1
    assert found["crosskv_decompression_duration_seconds_bucket cachegen +Inf"] == 2


def test_a_codec_is_there_before_its_first_segment_and_its_ratio_is_not_made_up() -> None:
    found = samples(CodecMeter(Coding("raw", "cachegen", form=FormLevel("sparse", "layers")).codecs).report())
    assert found["crosskv_compression_ratio raw"] == 1, "that is what raw means"
    for codec in ("cachegen", "sparse"):
        assert math.isnan(found[f"crosskv_compression_ratio {codec}"])
        assert found[f"crosskv_compression_duration_seconds_count {codec}"] == 0
        assert found[f"crosskv_decompression_duration_seconds_bucket {codec} +Inf"] == 0


def test_codecs_that_are_written_with_are_each_named_once() -> None:
    assert RAW_CODING.codecs == ("raw",)
    assert Coding("lossless", "cachegen").codecs == ("lossless", "cachegen")


@pytest.mark.parametrize(
    "codecs",
    [None, 5, {"lossless": None}, {"x": {"raw_bytes": 5}}, {"x": {**metered().report()["lossless"], "encoding": {}}}],
    ids=str,
)  # fmt: skip
def test_a_report_that_is_none_is_left_out(codecs: Any) -> None:
    assert samples(codecs) == {}


def test_reports_add_up() -> None:
    total = added_up([metered().report(), metered(300, 100).report(), metered(7, 7, "cachegen").report()])
    assert (total["lossless"]["raw_bytes"], total["lossless"]["coded_bytes"]) == (400, 150)
    assert sum(total["lossless"]["decoding"]["buckets"]) == 4
    assert total["cachegen"] == metered(7, 7, "cachegen").report()["cachegen"]


class Worker:
    def __init__(self, meter: CodecMeter) -> None:
        self.meter = meter
        self.answers = True
        self.codec_report = SimpleNamespace(remote=self._report)

    async def _report(self) -> Any:
        if not self.answers:
            await asyncio.sleep(60)
        return self.meter.report()


def test_a_worker_that_ends_or_does_not_answer_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "ANSWER_S", 0.01)
    first, second = Worker(metered()), Worker(metered(300, 100))

    async def check() -> None:
        reports = CodecReports()
        assert (await reports.report([first, second]))["lossless"]["raw_bytes"] == 400
        second.answers = False
        assert (await reports.report([first, second]))["lossless"]["raw_bytes"] == 400
        third = Worker(metered(1, 1))
        assert (await reports.report([second, third]))["lossless"]["raw_bytes"] == 401
        assert (await reports.report([]))["lossless"]["raw_bytes"] == 401

    asyncio.run(check())
