"""The benchmark's figures, ratios, targets and page, of requests that were made up."""

import json
import re
from dataclasses import replace

import pytest

from load_tests.bench.arms import BASE, BLENDED, EXACT
from load_tests.bench.balance import added, by_metrics, by_usage, variation
from load_tests.bench.figures import figures
from load_tests.bench.plan import Key, Plan, Sizes
from load_tests.bench.report import PLACE, as_json, closing, draw, markdown
from load_tests.bench.summary import rows, verdicts
from load_tests.harness.client import Measured


def one(number, ttft_s=1.0, *, returning=False, error=None, kv_cache=None, cached=0, sent_s=0.0, ended_s=2.0):
    return Measured(number, returning, sent_s, ttft_s, 0.1, ended_s, 100, 10, cached, kv_cache, error)


def from_tiers(replica="0", **tokens):
    reused = {"device": 0, "cpu": 0, "redis": 0} | tokens
    return reused | {"recomputed": 100 - sum(reused.values()), "replica": replica}


def key(arm=EXACT, alternation=0, working_set=1.5, workload="long-document-qa"):
    return Key("365m", alternation, arm, workload, working_set)


def measurement(ttft_s, tokens_per_s=10.0, balance=0.1):
    found = figures([one(0, ttft_s), one(1, ttft_s, returning=True)], balance, 5.0, 1 << 30)
    return found | {"output_tokens_per_s": tokens_per_s}


# From requests to figures


def test_returning_and_cold_prompts_are_told_apart():
    found = figures([one(0, 4.0), one(1, 1.0, returning=True), one(2, 2.0, returning=True)], None, 0.0, 0)
    assert (found["ttft_cold"]["mean"], found["ttft_returning"]["mean"]) == (4.0, 1.5)
    assert found["ttft"]["count"] == 3
    assert found["ttft"]["mean"] == pytest.approx(7 / 3)


def test_throughput_is_over_the_time_from_the_first_request_to_the_last_answer():
    found = figures([one(0, sent_s=1.0, ended_s=2.0), one(1, sent_s=2.0, ended_s=5.0)], None, 0.0, 0)
    assert found["output_tokens_per_s"] == 20 / 4.0
    assert found["answer"]["mean"] == 2.0


def test_failed_requests_are_counted_and_left_out_of_everything_else():
    found = figures([one(0, 1.0), replace(one(1), error="503", ttft_s=None)], None, 0.0, 0)
    assert (found["requests"], found["errors"], found["error"]) == (2, 1, "503")
    assert (found["ttft"]["count"], found["prompt_tokens"], found["output_tokens"]) == (1, 100, 10)


def test_tokens_are_recomputed_or_come_from_a_tier():
    found = figures(
        [one(0, kv_cache=from_tiers(device=10, cpu=20)), one(1, kv_cache=from_tiers(redis=30))], None, 0.0, 0
    )
    assert found["reuse"] == {"device": 10, "cpu": 20, "redis": 30}
    assert found["recomputed_tokens"] == 200 - 60


def test_a_server_without_tiers_reuses_from_its_device():
    found = figures([one(0, cached=64)], None, 0.0, 0)
    assert found["reuse"] == {"device": 64, "cpu": 0, "redis": 0}
    assert found["recomputed_tokens"] == 36


# Load balance


def test_a_replica_without_requests_counts():
    assert variation({"0": 5, "1": 5}, 2) == 0.0
    assert variation({"0": 10}, 2) == 1.0
    assert variation(None, 2) is None


def test_crosskv_says_who_answered():
    found = [one(number, kv_cache=from_tiers(replica)) for number, replica in enumerate("0010")]
    assert by_usage(found) == {"0": 3, "1": 1}


METRICS = """# TYPE ray_serve_deployment_request_counter counter
ray_serve_deployment_request_counter_total{deployment="LLMServer:40m",replica="a",route="/v1/chat/completions"} 3.0
ray_serve_deployment_request_counter_total{deployment="LLMServer:40m",replica="b",route="/v1/chat/completions"} 1.0
ray_serve_deployment_request_counter_total{deployment="LLMServer:40m",replica="b",route="/v1/models"} 9.0
ray_serve_deployment_request_counter_total{deployment="OpenAiIngress",replica="c",route="/v1/chat/completions"} 4.0
"""


def test_serve_counts_the_chat_requests_of_each_engine():
    assert by_metrics(METRICS) == {"a": 3, "b": 1}


def test_only_what_was_added_counts_and_only_if_it_is_all():
    assert added({"a": 3}, {"a": 5, "b": 2}, 4) == {"a": 2, "b": 2}
    assert added({"a": 3}, {"a": 5, "b": 2}, 5) is None
    assert added(None, {"a": 5}, 5) is None


# The report


def measured_runs():
    return {
        key(BASE, 0): measurement(1.0, 10.0),
        key(BASE, 1): measurement(2.0, 20.0),
        key(BASE, 2): measurement(4.0, 10.0),
        key(EXACT, 0): measurement(0.1, 21.0),
        key(EXACT, 1): measurement(0.4, 44.0),
        key(EXACT, 2): measurement(0.4, 19.0),
    }


def test_ratios_are_of_one_alternation_and_spreads_over_all():
    base, ours = rows(measured_runs())
    spread = ours.ratios["ttft_returning_s"]
    assert (spread.least, spread.median, spread.most) == pytest.approx((0.1, 0.1, 0.2))
    assert ours.values["ttft_returning_s"].median == pytest.approx(0.4)
    assert base.ratios["ttft_returning_s"].median == 1.0


def test_an_interval_pairs_requests_by_number_within_an_alternation_and_is_over_the_alternations():
    def asked(factor, numbers):
        return [{"number": number, "returning": number % 2 == 1, "ttft_s": factor * (1 + number)} for number in numbers]

    requests = {
        key(BASE, 0): asked(1.0, range(20)),
        key(EXACT, 0): asked(0.5, reversed(range(16))),  # in another order, and four have failed
        key(BASE, 1): [*asked(1.0, range(1, 2)), {"number": 3, "returning": True, "ttft_s": None}],
        key(EXACT, 1): asked(0.6, range(1, 5)),
    }
    ours = next(row for row in rows(measured_runs(), requests) if row.arm == EXACT)
    returning, whole = ours.intervals["ttft_returning_s"], ours.intervals["ttft_s"]
    assert (returning.pairs, whole.pairs) == (2, 2)
    assert returning.low < 0.5 < 0.6 < returning.high
    assert not returning.is_shown
    alone = {one: list(asked) for one, asked in requests.items() if one.alternation == 0}
    ours = next(row for row in rows(measured_runs(), alone) if row.arm == EXACT)
    returning, whole = ours.intervals["ttft_returning_s"], ours.intervals["ttft_s"]
    assert (returning.low, returning.high, returning.pairs) == (0.5, 0.5, 8)
    assert whole.pairs == 16
    assert returning.is_shown
    assert next(row for row in rows(measured_runs()) if row.arm == EXACT).intervals["ttft_s"] is None


def test_an_alternation_that_one_arm_lacks_has_no_ratio():
    runs = measured_runs()
    del runs[key(BASE, 1)]
    ours = next(row for row in rows(runs) if row.arm == EXACT)
    assert ours.ratios["ttft_returning_s"].most == pytest.approx(0.1)
    assert ours.alternations == 3


BOTH = {"ttft_returning_s", "output_tokens_per_s"}


@pytest.mark.parametrize(
    ("model", "workload", "working_set", "bounds"),
    [
        ("365m", "long-document-qa", 3, (0.12, 2.2)),
        ("365m", "long-document-qa", 0.5, (0.6, 1.2)),
        ("365m", "multi-round-qa", 1.5, (0.08, 3.0)),
        ("40m", "multi-round-qa", 1.5, (0.25, 1.8)),
        ("40m", "long-document-qa", 0.5, ()),
        ("10m", "long-document-qa", 1.5, ()),
        ("365m", "straggler-burst", 1.5, ()),
    ],
)
def test_each_row_has_its_own_targets(model, workload, working_set, bounds):
    runs = {
        replace(name, model=model, workload=workload, working_set=working_set): found
        for name, found in measured_runs().items()
    }
    targets = [verdict.target for verdict in verdicts(rows(runs))]
    assert tuple(target.bound.value for target in targets) == bounds
    assert {target.figure for target in targets} == (BOTH if bounds else set())


@pytest.mark.parametrize(
    ("ttft_s", "tokens_per_s", "met"), [(0.12, 22.0, 2), (0.13, 22.0, 1), (0.12, 21.0, 1), (0.5, 10.0, 0)]
)
def test_a_target_is_judged_by_the_median_ratio(ttft_s, tokens_per_s, met):
    judged = verdicts(rows({key(BASE): measurement(1.0), key(): measurement(ttft_s, tokens_per_s)}))
    assert sum(verdict.is_met for verdict in judged) == met
    assert closing(judged) == ("All 2 targets are met." if met == 2 else f"{met} of 2 targets are met.")


def test_rearranged_chunks_are_judged_in_the_blended_arm_at_every_size():
    where = {"workload": "rearranged-chunks"}
    for working_set in (0.5, 3.0):
        runs = {
            key(arm, working_set=working_set, **where): measurement(ttft_s, tokens_per_s)
            for arm, ttft_s, tokens_per_s in ((BASE, 1.0, 10.0), (EXACT, 0.9, 11.0), (BLENDED, 0.29, 19.0))
        }
        judged = verdicts(rows(runs))
        assert [(one.row.arm, one.target.bound.value, one.is_met) for one in judged] == [
            (BLENDED, 0.3, True),
            (BLENDED, 2.0, False),
        ]
        assert f"365m, rearranged-chunks, {working_set:g} x, crosskv-blended: TTFT" in markdown(
            rows(runs), judged, {}, {}
        )


def test_blended_tokens_and_the_hit_rate_have_columns_and_others_have_neither():
    kv = [from_tiers(cpu=60) | {"blended": 40}, from_tiers(device=20)]
    found = figures([one(number, kv_cache=usage) for number, usage in enumerate(kv)], None, 0.0, 0)
    assert found["blended_tokens"] == 40
    measured = {key(BLENDED): found | {"blend_hit_rate": 0.9}, key(BASE): measurement(1.0)}
    by_arm = {row.arm: row.values for row in rows(measured)}
    assert by_arm[BLENDED]["blended_share"].median == 40 / 200
    assert by_arm[BLENDED]["blend_hit_rate"].median == 0.9
    assert by_arm[BASE]["blend_hit_rate"] is None
    page = markdown(rows(measured), [], {}, {})
    assert "| of all blended | chunk tokens found |" in page
    assert "| 20 % | 90 % |" in page


def test_without_the_base_arm_nothing_is_judged():
    assert verdicts(rows({key(): measurement(0.1)})) == []
    assert "No target was judged" in closing([])


def test_the_table_has_every_arm_and_says_what_was_missed_and_skipped():
    runs = {key(BASE): measurement(1.0), key(): measurement(0.151, 30.0, balance=None)}
    found = rows(runs)
    text = markdown(found, verdicts(found), {"lmcache": "no connector"}, {"replicas": "2"})
    assert "**Missed**: 365m, long-document-qa, 1.5 x: TTFT of returning prompts, mean is 0.151 (0.151 " in text
    assert "Met: 365m, long-document-qa, 1.5 x: output tokens per second is 3 (" in text
    assert "Not run: plain vLLM with LMCache (no connector)." in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = table.splitlines()
        assert len(lines) == 2 + len(found)
        assert len({line.count("|") for line in lines}) == 1
    assert " n/a " in text


def test_the_json_names_its_figures_and_holds_the_verdicts():
    found = rows(measured_runs())
    plan = Plan(("40m",), (BASE, EXACT), ("qa",), (1.5,), 3, Sizes())
    document = json.loads(json.dumps(as_json(plan, found, verdicts(found), {}, {})))
    assert set(document["rows"][0]["values"]) == set(document["figures"])
    assert [target["met"] for target in document["targets"]] == [True, False]


def test_the_projects_page_has_a_place_for_the_results():
    whole = PLACE.page.read_text()
    assert whole.index(PLACE.begin) < whole.index(PLACE.end)


def test_a_picture_is_drawn_for_each_quantity(tmp_path):
    found = rows(measured_runs() | {key(EXACT, 0, 0.5): measurement(0.1)})
    paths = draw(found, tmp_path, "bench")
    assert len(paths) == 4
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_what_keeps_kv_beside_the_engines_has_a_share_of_the_processor_time_and_peers_have_none():
    found = rows({key(): measurement(1.0) | {"keeping_cpu_s": 0.2}, key(BASE): measurement(2.0)})
    shares = {row.arm: row.values["keeping_share"] for row in found}
    assert shares[EXACT].median == pytest.approx(0.04)
    assert shares[BASE] is None
