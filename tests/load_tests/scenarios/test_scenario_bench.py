"""The scenarios' workloads, figures and tables; no server."""

from __future__ import annotations

import json
import random

import pytest

from configs.model_folder import PROJECT_ROOT
from configs.presets import find_scenario, scenario_names
from configs.settings import load_settings
from load_tests.harness.client import Measured
from load_tests.harness.models import token_counter
from load_tests.scenarios import __main__ as command
from load_tests.scenarios.__main__ import BEGIN, END, PAGE, Plan
from load_tests.scenarios.measure import Round, firsts, reused_share, throughput
from load_tests.scenarios.report import Found
from load_tests.scenarios.uses import DEFAULTS, LONGEST, SAME_PROMPTS, SCENARIO, USES
from load_tests.workloads import Words
from load_tests.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("each_processor")

PLAN = Plan("demo", "auto", 6, 0)


@pytest.fixture(scope="module")
def text() -> Words:
    return Words(token_counter(PROJECT_ROOT / "models" / "demo"))


def workload(name: str, text: Words, seed: int = 1) -> Workload:
    return USES[name].workload(random.Random(seed), text)


def test_each_scenario_has_a_workload_and_a_place_on_the_page() -> None:
    assert sorted(USES) == scenario_names()
    page = PAGE.read_text()
    assert all(BEGIN.format(name=name) in page and END.format(name=name) in page for name in USES)


@pytest.mark.parametrize("name", USES)
def test_the_servers_differ_by_the_scenario_alone(name: str) -> None:
    plain, special = PLAN.settings(None), PLAN.settings(name)
    assert special == {**plain, "scenario": name}
    load_settings(special)
    for section, own in (find_scenario(name) or {}).items():
        assert not plain.get(section, {}).keys() & own.keys(), "what the benchmark sets, the scenario cannot choose"


@pytest.mark.parametrize("name", USES)
def test_a_workload_fits_the_servers_and_is_new_with_each_seed(name: str, text: Words) -> None:
    one, same, other = workload(name, text), workload(name, text), workload(name, text, 2)
    assert one == same != other
    count = token_counter(PROJECT_ROOT / "models" / "demo")
    for request in one.requests:
        tokens = sum(count(message.content or "") or request.max_tokens for message in request.messages)
        assert tokens + 4 * len(request.messages) + request.max_tokens <= LONGEST
    assert USES[name].judges_all or any(request.returning for request in one.requests)
    lengths = {len(request.messages[0].content or "") for request in one.requests}
    assert len(lengths) > 1 or name in ("chat", "rag")


def test_short_prompts_are_short(text: Words) -> None:
    count = token_counter(PROJECT_ROOT / "models" / "demo")
    assert max(count(request.messages[0].content or "") for request in workload("short", text).requests) < 1_000


def test_what_comes_once_more_are_first_requests_one_by_one(text: Words) -> None:
    again = firsts(workload("cost", text))
    assert [request.number for request in again.requests] == list(range(5))
    assert again.concurrency == 1
    assert len({request.messages[0] for request in again.requests}) == 5


def test_only_lossy_scenarios_ask_for_loss_and_the_defaults_have_exact_prompts_too() -> None:
    assert {name for name, use in USES.items() if use.fidelity} == {"rag", "cost"}
    use = USES["cost"]
    assert use.arms == (DEFAULTS, SAME_PROMPTS, SCENARIO)
    asked = {"kv_cache": {"fidelity": "tolerant"}}
    assert [use.body(arm) for arm in use.arms] == [{}, asked, asked]


def answered(sent_s: float, ended_s: float, tokens: int, prompt: int, recomputed: int) -> Measured:
    return Measured(0, True, sent_s, 0.1, None, ended_s, prompt, tokens, None, {"recomputed": recomputed}, None)


def test_throughput_and_reuse_are_of_all_requests() -> None:
    measured = [answered(1.0, 3.0, 10, 100, 100), answered(2.0, 5.0, 10, 300, 0)]
    assert throughput(measured) == pytest.approx(20 / 4)
    assert reused_share(measured) == pytest.approx(0.75)


def one_round(ttft_s: float, redis: float, answer: str = "same") -> Round:
    return Round(ttft_s, 10.0, {"cpu": 1000.0, "redis": redis}, 100, 0.5, {0: answer, 1: "other"})


def found(ttft_s: float = 0.5, redis: float = 500.0, base: float = 1000.0, answer: str = "same") -> Found:
    rounds = {DEFAULTS: [one_round(1.0, base)] * 6, SCENARIO: [one_round(ttft_s, redis, answer)] * 6}
    return Found(USES["chat"], rounds)


def test_the_verdict_says_what_is_better_worse_and_not_shown() -> None:
    said = found(ttft_s=2.0).verdict()
    assert "Better: Redis, bytes a prompt token (0.50)." in said
    assert "Worse: time to the first token (2.00)." in said
    assert "No difference is shown in tokens/s of the workload and CPU tier, bytes a prompt token." in said


def test_where_the_defaults_store_nothing_there_is_no_ratio() -> None:
    nothing = found(redis=0.0, base=0.0)
    assert ["Redis, bytes a prompt token", SCENARIO, "0 / 0 / 0 B", "", ""] in nothing.lines()
    assert "Redis" not in nothing.verdict()


def test_answers_are_counted_where_they_differ_and_no_text_is_in_the_json() -> None:
    told = found(answer="changed")
    assert told.equal_answers(SCENARIO) == (6, 12)
    assert "Answers equal to the defaults': scenario 6 of 12." in " ".join(told.markdown(["m"]).split())
    assert "changed" not in json.dumps(told.as_dict())


def test_an_interrupted_run_reports_what_all_arms_have(monkeypatch: pytest.MonkeyPatch, text: Words) -> None:
    done = iter([one_round(1.0, 1.0)] * 6)

    def round_or_interrupt(*arguments: object) -> Round:
        try:
            return next(done)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(command, "one_round", round_or_interrupt)
    monkeypatch.setattr(Plan, "_server", lambda *arguments: None)
    assert PLAN.measured(USES["chat"], lambda: None).complete == 2, "six turns: a round that does not count, and two"
    with pytest.raises(KeyboardInterrupt):
        PLAN.measured(USES["chat"], lambda: None)
