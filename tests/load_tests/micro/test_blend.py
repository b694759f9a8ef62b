"""Blends beside prefills, measured: what is asked and judged, of answers that were made up."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest

from load_tests.harness.answers import Answer
from load_tests.harness.client import Measured, ServerError
from load_tests.micro.blend import __main__ as program
from load_tests.micro.blend.client import Blends, Neighbour, gaps_within
from load_tests.micro.blend.measure import (
    ALONE,
    BESIDE_BLEND,
    BESIDE_FULL,
    COLD,
    FULL,
    FirstTokens,
    first_tokens,
    hits,
    neighbour_gaps,
)
from load_tests.micro.blend.prompts import Prompts
from load_tests.micro.blend.report import PAGE, Results, as_json, comparisons, markdown, misses
from load_tests.workloads import Words

WORDS = Words(lambda text: len(text.split()))
KV = {"device": 0, "cpu": 800, "redis": 0, "recomputed": 200, "replica": "0"}


def answer(ttft_s: float, prompt_tokens: int, kv_cache: dict[str, Any]) -> Answer:
    made = Answer()
    made.ttft_s, made.usage = ttft_s, {"prompt_tokens": prompt_tokens, "kv_cache": kv_cache}
    return made


@dataclass
class FakeClient(Blends):
    """A full prefill takes a second, a blend a quarter; chunks that were never sent are computed."""

    blends: bool = True
    asked: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    async def ask(self, messages: Any, kv_cache: dict[str, Any], max_tokens: int = 1) -> Answer:
        documents = {message["content"] for message in messages[1:-1]}
        self.asked.append((kv_cache["fidelity"], frozenset(documents)))
        warm = documents <= self.known
        self.known |= documents
        if kv_cache["fidelity"] == "exact" or not warm or not self.blends:
            return answer(1.0, 1000, {**KV, "cpu": 0})
        return answer(0.25, 1000, {**KV, "blended": 800})

    async def rest(self) -> None:
        return

    @contextlib.asynccontextmanager
    async def neighbour(self, messages: Any, max_tokens: int) -> Any:
        yield Ticking()


class Ticking(Neighbour):
    """Its tokens come when they are waited for."""

    async def tokens(self, count: int) -> None:
        first = self.times[-1] if self.times else 0.0
        self.times += [first + 0.01 * number for number in range(1, count + 1)]


def fake() -> FakeClient:
    return FakeClient()


def measured(client: FakeClient, rounds: int = 3) -> FirstTokens:
    prompts = Prompts("seed", WORDS, chunks=4, lengths=(5, 9))
    return asyncio.run(first_tokens(client, prompts, [0.15], rounds, lambda: None))


def test_prompts_share_their_documents_and_nothing_before_them() -> None:
    prompts = Prompts("seed", WORDS, chunks=6, lengths=(5, 9))
    documents = prompts.documents()
    made = [prompts.prompt(documents) for _ in range(8)]
    assert len({one[0]["content"] for one in made}) == len(made)
    assert {frozenset(message["content"] for message in one[1:-1]) for one in made} == {
        frozenset(message["content"] for message in documents)
    }
    assert len({tuple(message["content"] for message in one[1:-1]) for one in made}) > 1
    assert len({len(message["content"].split()) for message in prompts.documents() + documents}) > 1
    again = Prompts("seed", WORDS, chunks=6, lengths=(5, 9))
    assert again.documents() == documents


def test_each_round_stores_new_documents_and_asks_every_arm_about_them_in_rotating_order() -> None:
    client = fake()
    found = measured(client)
    rounds = [client.asked[at : at + 3] for at in range(0, len(client.asked), 3)]
    assert len(rounds) == 4  # one warms up
    assert all(len({documents for _, documents in one}) == 1 for one in rounds)
    assert len({one[0][1] for one in rounds}) == 4
    assert [[fidelity for fidelity, _ in one] for one in rounds[1:]] == [
        ["blended", "exact", "blended"],
        ["blended", "blended", "exact"],
        ["blended", "exact", "blended"],
    ]
    assert found.seconds == {COLD: [1.0] * 3, FULL: [1.0] * 3, "blended, 15 %": [0.25] * 3}
    assert found.blended_share("blended, 15 %").median == 0.8


def test_a_blend_that_was_none_is_no_measurement() -> None:
    client = fake()
    client.blends = False
    with pytest.raises(ServerError, match="Of 1000 tokens 0 were blended"):
        measured(client)


def test_gaps_are_those_that_something_ran_in() -> None:
    assert gaps_within([0.0, 1.0, 3.0, 4.0, 9.0], 1.5, 3.5) == [2.0, 1.0]
    assert gaps_within([0.0, 1.0], 2.0, 3.0) == []


def test_a_neighbour_is_watched_alone_and_beside_both_arms_in_turn() -> None:
    client = fake()
    prompts = Prompts("seed", WORDS, chunks=4, lengths=(5, 9))
    gaps = asyncio.run(neighbour_gaps(client, prompts, 0.15, 2, 100, lambda: None))
    assert {arm: len(rounds) for arm, rounds in gaps.items()} == {ALONE: 2, BESIDE_BLEND: 2, BESIDE_FULL: 2}
    assert [fidelity for fidelity, _ in client.asked] == ["blended", "blended", "exact", "blended", "exact", "blended"]


def answered(reused: int, error: str | None = None) -> Measured:
    return Measured(0, False, 0.0, 1.0, None, 1.0, 1000, 1, 0, {**KV, "cpu": reused}, error)


def test_the_hit_rate_is_of_all_prompt_tokens() -> None:
    found = hits([answered(950), answered(900), answered(960)], 0.97)
    assert found.rate == pytest.approx(0.62)  # the first one's chunks were computed for it
    assert found.by_prompt == [0.0, 0.9, 0.96]
    with pytest.raises(ServerError, match="was not answered: 503"):
        hits([answered(0, "503")], None)


def results(blend_s: float = 0.3, cold_s: float = 1.05, largest_s: float = 0.2, reused: int = 960) -> Results:
    asked = {**KV, "blended": 800}
    one = FirstTokens()
    for _ in range(3):
        for arm, seconds in ((FULL, 1.0), (COLD, cold_s), ("blended, 15 %", blend_s)):
            one.add(arm, answer(seconds, 1000, asked))
    gaps = {arm: [[0.02, 0.03, longest]] * 3 for arm, longest in ((ALONE, 0.03), (BESIDE_BLEND, largest_s))}
    return Results(
        {2: one}, {2: {**gaps, BESIDE_FULL: [[0.5]] * 3}}, hits([answered(0), *[answered(reused)] * 9], None)
    )


@pytest.mark.parametrize(
    ("missed", "sentence"),
    [
        ({}, ""),
        ({"blend_s": 0.34}, "chunks stored, check layer 2, blended, 15 %: 0.340"),
        ({"cold_s": 1.2}, "chunks new, check layer 2, cold"),
        ({"largest_s": 0.3}, "largest gap with a blend, check layer 2: 300 ms"),
        ({"reused": 900}, "hit rate 0.810"),
    ],
)
def test_each_target_is_judged_by_itself(missed: dict[str, Any], sentence: str) -> None:
    said = misses(results(**missed))
    assert len(said) == bool(missed)
    assert all(sentence in one for one in said)
    page = markdown(results(**missed), ["a machine"])
    assert page.endswith(said[0] if said else "All targets are reached.")


def test_the_page_has_every_arm_and_the_json_every_value() -> None:
    page = markdown(results(), ["a machine"])
    assert "| TTFT, chunks stored, check layer 2 | blended, 15 % |" in page
    assert "0.300 / **0.300** / 0.300" in page
    assert "| 2 | with a blend | 30 / 30 / 30 | 200 / 200 / 200 | ≤ 250 ms |" in page
    assert "check layer 2, blended, 15 %: 80 %" in page
    found = as_json(results(), ["a machine"])
    assert [one["title"] for one in found["comparisons"]] == [one.title for one in comparisons(results())]
    assert found["gaps_s"]["2"][BESIDE_BLEND] == [[0.02, 0.03, 0.2]] * 3
    assert found["hits"]["rate"] == pytest.approx(0.864)


def test_the_projects_page_has_a_place_for_the_results() -> None:
    whole = PAGE.read_text()
    assert whole.index(program.BEGIN) < whole.index(program.END)
