"""What a running server shows: the metrics that its page lists, all that rules and the dashboard ask for, and more."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from configs.model_folder import PROJECT_ROOT
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer

sys.path.insert(0, str(PROJECT_ROOT / "tests" / "configs" / "observability"))
sys.path.insert(0, str(Path(__file__).parent))

import queries

pytestmark = pytest.mark.server

ONLY_WHERE_REPLICAS_FOLLOW_THE_LOAD = {"crosskv_replicas_target", "crosskv_replicas_running"}
DOCUMENT = " ".join(f"Anna lives in Paris. Ben is a baker. Note {number}." for number in range(40))


@pytest.fixture(scope="module")
def text(server: RunningServer) -> str:
    """GET /metrics after a prompt that one replica computed and the other one loaded."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    for pin in (0, 1):
        before = server.segments("cpu")
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "system", "content": DOCUMENT}, {"role": "user", "content": "Where does Anna live?"}],
            max_tokens=8,
            extra_body={"cache_salt": "metrics"},
            extra_headers={"X-CrossKV-Replica": str(pin), "X-Request-Id": "nobody-s-label"},
        )
        if pin == 0:
            server.wait_until(lambda: server.segments("cpu") > before, "the prompt is in the CPU tier")  # noqa: B023
    server.wait_until_idle()
    return server.metrics_page()


@pytest.fixture(scope="module")
def families(text: str) -> dict[str, Metric]:
    """By the names of samples. A family that has none yet is there, too."""
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith(("crosskv_", "vllm:")) and not family.name.endswith("_created"):
            ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            found |= {f"{family.name}{end}": family for end in ends}
    return found


@pytest.mark.parametrize("what", ["compression_ratio", "blend_hit_rate", "layerwise_load_latency"])
def test_what_a_user_greps_for_is_there_after_any_traffic(text: str, what: str) -> None:
    """`curl -s localhost:8000/metrics | grep …` finds a sample, not only what it would mean."""
    assert [line for line in text.splitlines() if what in line and not line.startswith("#")]


def test_the_codec_that_redis_is_written_with_has_a_ratio(families: dict[str, Metric]) -> None:
    """Not yet measured, or of real segments: never smaller than raw, for such a segment is stored raw."""
    ratios = {s.labels["codec"]: s.value for s in families["crosskv_compression_ratio"].samples}
    assert "lossless" in ratios
    assert all(math.isnan(ratio) or ratio >= 1 for ratio in ratios.values())


def test_every_layer_of_every_replica_is_told(server: RunningServer, text: str) -> None:
    """`curl -s localhost:8000/api/v1/layerwise/stats | jq '.layer_times'`, layers that no load brought included."""
    layers = httpx.get(f"{server.url}/api/v1/layerwise/stats", timeout=patience(60)).json()["layer_times"]
    shape = json.loads((PROJECT_ROOT / "models" / "demo" / "config.json").read_text())
    places = [(one["replica"], one["layer"]) for one in layers]
    assert places == [(replica, layer) for replica in (0, 1) for layer in range(shape["num_hidden_layers"])]
    for one in layers:
        assert one.keys() == {"replica", "layer", "count", "load_ms", "wait_ms"}
        assert (one["load_ms"] is None) == (one["count"] == 0)


def test_the_page_lists_every_metric_of_the_server_with_its_labels(families: dict[str, Metric]) -> None:
    listed = queries.listed()
    ours = {name: family for name, family in families.items() if name.startswith("crosskv_")}
    assert len(ours) > 100
    assert set(ours) <= set(listed)
    for name, family in ours.items():
        shown = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert shown <= listed[name], name


def test_a_server_shows_what_the_page_promises(families: dict[str, Metric]) -> None:
    """But for what needs scaling, a scheduling policy, an engine of its own process, or windows or states."""
    of_policies = ("crosskv_preempt", "crosskv_brought_", "crosskv_scheduler_", "crosskv_step_")
    optional = ("crosskv_replicas_", "crosskv_held_", *of_policies)
    missing = {name for name in queries.listed() if name not in families and not name.startswith(optional)}
    assert missing == set()


@pytest.mark.parametrize("query", queries.all_queries())
def test_a_query_finds_its_metrics_and_labels(families: dict[str, Metric], query: str) -> None:
    for one in queries.selectors(query):
        if one.metric in ONLY_WHERE_REPLICAS_FOLLOW_THE_LOAD:
            continue
        assert one.metric in families
        shown = [frozenset(sample.labels) for sample in families[one.metric].samples]
        known = frozenset().union(*shown) or queries.listed().get(one.metric, frozenset())
        others = [frozenset(s.labels) for o in queries.selectors(query) if o.metric in families
                  for s in families[o.metric].samples]  # fmt: skip
        assert one.labels <= known.union(*others)


def test_no_id_of_a_request_is_a_label(text: str) -> None:
    assert "nobody-s-label" not in text


def test_a_client_is_told_its_requests_id_once(server: RunningServer) -> None:
    """Ray Serve writes the header in front of the ingress."""
    with httpx.Client(base_url=server.url, timeout=patience(60), headers={"X-Request-Id": "order-66"}) as http:
        for path in ("/v1/models", "/nowhere"):
            assert http.get(path).headers.get_list("x-request-id") == ["order-66"]
    made = httpx.get(f"{server.url}/v1/models", timeout=patience(60)).headers.get_list("x-request-id")
    assert len(made) == 1
    assert made[0]
