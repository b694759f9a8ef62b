"""What the ingress expects of answers: by tenant, within what a request allows, learned from what has ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from failed_replicas import leave
from fake_backend import FakeReplicas, say, think_for_ever
from ingress_server import CHAT, COMPLETION, wait_until
from prometheus_client import CollectorRegistry
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from app import ingress
from app.answers.lengths import NODE_BYTES, ExpectedLengths
from app.metrics.ingress import IngressMetrics
from deployments.protocol.wire import GenerateRequest
from kvmanager.scheduling.virtual_counters import ANSWER_COST, Bill, VirtualCounters

BLOCK = 32
MOST_BYTES = 20 * 2**20


def lengths(*tenants: str, most_bytes: int = MOST_BYTES) -> ExpectedLengths:
    return ExpectedLengths(tenants, BLOCK, 8, most_bytes, IngressMetrics(CollectorRegistry()))


def nodes(of: ExpectedLengths) -> list[int]:
    """In each trie."""
    return [len(trie) for trie in of._tries.values()]


def request(seed: int, blocks: int = 10, **params: Any) -> GenerateRequest:
    rng = Random(seed)
    hashes = [rng.randbytes(32) for _ in range(blocks)]
    return GenerateRequest(str(seed), [1] * (BLOCK * blocks), SamplingParams(**params), "salt", hashes)


def output(tokens: int, reason: str | None, index: int = 0, finished: bool = True, cached: int = 0) -> RequestOutput:
    answer = CompletionOutput(index, "", [1] * tokens, None, None, finish_reason=reason)
    return RequestOutput(
        "1", None, None, prompt_logprobs=None, outputs=[answer], finished=finished, num_cached_tokens=cached
    )


def answer(of: ExpectedLengths, tenant: str, asked: GenerateRequest, tokens: int, reason: str = "stop") -> None:
    of.of(tenant, asked).hear(output(tokens, reason), "a")


def value(of: ExpectedLengths, name: str, **labels: str) -> float:
    found = of._metrics.registry.get_sample_value(name, labels)
    assert found is not None
    return found


def test_no_tenant_learns_of_another_whatever_their_prompts_and_salts_are():
    both = lengths("a", "b")
    before = both.of("b", request(1)), both.by_prompt_length("b", 320, SamplingParams(max_tokens=9999))
    for _ in range(50):
        answer(both, "a", request(1), 4000)  # the same hashes, which no salt of two tenants gives
    assert both.of("a", request(1)).tokens is None or both.of("a", request(1, max_tokens=9999)).tokens > 2000
    after = both.of("b", request(1)), both.by_prompt_length("b", 320, SamplingParams(max_tokens=9999))
    assert (after[0].tokens, after[0].work, after[1]) == (before[0].tokens, before[0].work, before[1])


def test_no_tenant_pushes_out_what_another_taught():
    both = lengths("a", "b")
    for _ in range(9):
        answer(both, "b", request(1, max_tokens=9999), 4000)
    for seed in range(2, 40):
        answer(both, "a", request(seed, blocks=MOST_BYTES // NODE_BYTES // 4), 1)
    assert both.of("b", request(1, max_tokens=9999)).tokens > 2000


def test_the_tries_fill_their_memory_and_no_more_of_it_whatever_prompts_come():
    most = 64 * NODE_BYTES
    alone, both = lengths(most_bytes=most), lengths("a", "b", most_bytes=most)
    for seed in range(100):
        answer(alone, "", request(seed), 20)
        answer(both, "a", request(seed), 20)
        answer(both, "b", request(seed), 20)
    assert nodes(alone) == [64]
    assert nodes(both) == [32, 32]


@pytest.mark.parametrize("mib", [5, 15])
def test_the_memory_is_the_one_that_is_set(fresh, monkeypatch, mib):
    made = list[ExpectedLengths]()

    def make(*given: Any) -> ExpectedLengths:
        made.append(ExpectedLengths(*given))
        return made[-1]

    monkeypatch.setattr(ingress, "ExpectedLengths", make)
    fresh(answer_memory_bytes=mib * 2**20 * 16 // 5)
    (of,) = made
    for seed in range(mib * 1500):
        answer(of, "", request(seed), 20)
    assert nodes(of) == [mib * 2**20 // NODE_BYTES]


def test_what_is_expected_lies_within_what_the_request_allows():
    one = lengths()
    for _ in range(20):
        answer(one, "", request(1, max_tokens=9999), 300)
    assert 200 < one.of("", request(1, max_tokens=9999)).tokens < 400
    assert one.of("", request(1, max_tokens=7)).tokens == 7
    assert one.of("", request(1, max_tokens=9999, min_tokens=1000)).tokens == 1000
    assert one.of("", request(1, max_tokens=5000, ignore_eos=True)).tokens == 5000
    assert one.by_prompt_length("", 320, SamplingParams(max_tokens=7)) == 7


def test_its_work_counts_known_blocks_as_cached_and_every_answer():
    one = lengths()
    answer(one, "", request(1), 16)
    work = one.of("", request(1, max_tokens=5, n=3)).work
    assert (work.prompt_tokens, work.cached_tokens, work.answer_tokens) == (320, 320, 15)
    assert one.of("", request(2)).work.cached_tokens == 0


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_an_answer_that_did_not_end_teaches_nothing(reason: str | None):
    one = lengths()
    before = one.of("", request(1, max_tokens=9999)).tokens
    for _ in range(20):
        answer(one, "", request(1, max_tokens=9999), 1, reason)
    answer(one, "", request(1, max_tokens=9999, ignore_eos=True), 1, "length")
    assert one.of("", request(1, max_tokens=9999)).tokens == before
    answer(one, "", request(1, max_tokens=9999), 1)
    assert one.of("", request(1, max_tokens=9999)).tokens < before


def test_several_answers_teach_their_mean_once_all_have_ended():
    one = lengths()
    asked = request(1, max_tokens=9999, n=2)
    expected = one.of("", asked)
    expected.hear(output(3, "stop", 0, finished=False), "a")
    assert value(one, "crosskv_answer_length_log2_error_count") == 0
    expected.hear(output(5, "stop", 1), "a")
    assert value(one, "crosskv_answer_length_log2_error_count") == 1
    assert value(one, "crosskv_answer_length_log2_error_sum") == pytest.approx(6)  # 4 tokens for 256


def test_pairs_are_counted_by_how_they_are_ranked():
    one = lengths()
    for _ in range(10):
        for seed, tokens in ((1, 8), (2, 1000)):
            answer(one, "", request(seed, max_tokens=9999), tokens)
    right, wrong, even = (
        value(one, "crosskv_answer_lengths_ranked_total", outcome=outcome) for outcome in ("right", "wrong", "even")
    )
    assert right >= 17
    assert right + wrong + even == 19
    before = right
    answer(one, "", request(2, max_tokens=9999), 1)
    assert value(one, "crosskv_answer_lengths_ranked_total", outcome="right") == before
    answer(one, "", request(1, max_tokens=9999), 900, "length")  # how long it had become, nobody knows
    assert value(one, "crosskv_answer_lengths_ranked_total", outcome="right") == before


def test_its_bill_follows_the_outputs():
    one, counters = lengths(), VirtualCounters([""])
    expected = one.of("", request(1, max_tokens=10))
    expected.bill = Bill(counters, "", expected.work)
    expected.bill.send()
    assert counters.counter("") == 320 + 10 * ANSWER_COST
    expected.hear(output(1, None, finished=False, cached=320), "a")
    assert counters.counter("") < 30
    expected.hear(output(1, "stop", cached=320), "a")
    expected.bill.close()
    assert counters.counter("") == pytest.approx(320 * 0.02 + 2 * ANSWER_COST)


@pytest.mark.parametrize(("kind", "share"), [(RequestOutputKind.DELTA, 0), (RequestOutputKind.FINAL_ONLY, 1)])
def test_who_leaves_before_an_output_pays_what_may_have_been_computed_for_it(kind: RequestOutputKind, share: int):
    """Else a client that clears its KV, asks again and leaves in time has prompts computed at the price of cached ones,
    and long answers that it never reads for nothing."""
    one, counters = lengths(), VirtualCounters([""])
    asked = request(1, max_tokens=10, n=2)
    asked.sampling_params.output_kind = kind
    answer(one, "", request(1, max_tokens=10), 10)
    expected = one.of("", asked)
    assert expected.work.cached_tokens == 320
    expected.bill = Bill(counters, "", expected.work)
    expected.bill.send()
    expected.left()
    expected.bill.close()
    assert counters.counter("") == 320 + share * expected.work.answer_tokens * ANSWER_COST


def test_who_leaves_behind_an_output_pays_what_it_had():
    one, counters = lengths(), VirtualCounters([""])
    expected = one.of("", request(1, max_tokens=10))
    expected.bill = Bill(counters, "", expected.work)
    expected.bill.send()
    expected.hear(output(1, None, finished=False, cached=320), "a")
    expected.left()
    expected.bill.close()
    assert counters.counter("") == pytest.approx(320 * 0.02 + ANSWER_COST)
    one.of("", request(1)).left()


def test_a_defect_is_counted_and_nothing_is_expected_then(own_records: Any):
    one = lengths()
    one._tries.clear()
    for _ in range(2):
        expected = one.of("", request(1))
        assert (expected.tokens, expected.work.prompt_tokens, expected.work.answer_tokens) == (None, 320, 0)
        expected.hear(output(1, "stop"), "a")
    assert one.by_prompt_length("", 5, SamplingParams()) == 0
    assert value(one, "crosskv_answer_length_defects_total") == 3
    assert len(own_records()) == 1


def test_the_replicas_are_told_and_a_stranger_never_goes_first(start):
    keys = {
        "key-a": "alice",
        "key-b": {"tenant": "batch", "priority": 10},
        "key-u": {"tenant": "urgent", "priority": -5},
        "key-o": {"tenant": "ops", "admin": True},
    }
    server = start(api_keys=keys)

    async def brief(asked: GenerateRequest) -> AsyncIterator[RequestOutput]:
        last = say(asked, [10, 11], " one", finished=True)
        last.outputs[0].finish_reason = "stop"
        yield last

    server.replicas.script = brief
    prompt = {**COMPLETION, "prompt": [5] * 100, "max_tokens": 300}
    wanted = [
        ("key-a", -3, 0), ("key-a", 7, 7), ("key-a", None, 0), ("key-a", -(2**63), 0), ("key-a", (2**63 - 1), 10**6),
        ("key-b", -3, 10), ("key-b", None, 10), ("key-b", 11, 11), ("key-u", -3, -3), ("key-u", -9, -5),
        ("key-u", None, 0), ("key-o", -9, -9), ("key-o", -(2**63 - 1), -(10**6)),
    ]  # fmt: skip
    for key, asked, _ in wanted:
        body = {**prompt, **({} if asked is None else {"priority": asked})}
        with server.http(headers={"authorization": f"Bearer {key}"}) as client:
            assert client.post("/v1/completions", json=body).status_code == 200
    sent = server.replicas.requests
    assert [one.priority for one in sent] == [obeyed for _, _, obeyed in wanted]
    assert sent[0].predicted_tokens == 256
    assert sent[4].predicted_tokens < 20
    assert sent[5].predicted_tokens == 256


def test_without_keys_only_this_machine_chooses_a_priority(vllm_config):
    from app.gate.auth import Caller

    assert Caller("").priority(-1) == 0
    assert Caller("", admin=True).priority(-1) == -1


def test_what_is_expected_is_reserved_where_a_body_does_not_say(start):
    server = start(FakeReplicas(), api_keys={"key-a": "alice"}, tokens_per_minute=600)
    body = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    left = []
    with server.http(headers={"authorization": "Bearer key-a"}) as client:
        for more in ({"max_tokens": 3}, {}, {}):
            answered = client.post("/v1/chat/completions", json={**body, **more, "stream": True})
            left.append(int(answered.headers["x-ratelimit-remaining-tokens"]))
    assert left[0] > 500
    assert left[1] == pytest.approx(left[0] + 3 - 256, abs=80)  # what was used of the first, and has come back since
    assert left[2] > 200  # what was not generated has come back


def test_costs_of_tenants_are_counted_by_their_tag(start):
    server = start(api_keys={"key-a": "alice", "key-b": "bob", "key-o": {"tenant": "ops", "admin": True}})
    with server.http(headers={"authorization": "Bearer key-a"}) as client:
        client.post("/v1/completions", json={**COMPLETION, "prompt": [5] * 100})
    with server.http(headers={"authorization": "Bearer key-o"}) as client:
        shown = client.get("/metrics").text
    costs = [line for line in shown.splitlines() if line.startswith("crosskv_tenant_cost_total")]
    assert len(costs) == 1
    assert costs[0].endswith(f" {100 + 3 * ANSWER_COST}")
    assert "alice" not in costs[0]


def test_a_client_that_leaves_before_its_whole_answer_pays_for_it(start):
    server = start(FakeReplicas(think_for_ever))
    body = {**COMPLETION, "prompt": [5] * 100, "max_tokens": 3}
    leave(server.url, body, lambda: server.replicas.requests, "/v1/completions")

    def costs() -> str:
        with server.http() as client:
            return client.get("/metrics").text

    wait_until(lambda: f'crosskv_tenant_cost_total{{tenant=""}} {100 + 3 * ANSWER_COST}' in costs())
