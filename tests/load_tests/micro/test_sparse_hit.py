"""Documents that come back from Redis, dense and sparse: what is asked and judged, of answers that were made up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from load_tests.harness.answers import Answer
from load_tests.harness.client import ServerError
from load_tests.micro.sparse_hit import __main__ as program
from load_tests.micro.sparse_hit.measure import Level, Round, one_round, same_share
from load_tests.micro.sparse_hit.report import as_json, comparisons, level_lines, markdown, misses
from load_tests.micro.sparse_hit.talks import Talk, demo_talk, word_talk
from load_tests.workloads import Words

WORDS = Words(lambda text: len(text.split()))
ROUND = Round(
    computed_s=1.0, hit_s=0.2, reused=0.9, redis_bytes=1 << 20, prompt_tokens=1000, answers=4, equal=4,
    same_tokens=1.0, right_before=3, right_after=3, lost=0,
)  # fmt: skip


@dataclass
class FakeServer:
    """Computes what it does not know in a second, and finds the rest in Redis once the device has forgotten it."""

    gives: int = 900
    changed: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    device: bool = False
    stored: bool = False

    def ask(self, request: dict[str, object]) -> Answer:
        question = str(request["messages"])
        self.log.append("ask")
        if self.device:
            found, seconds = {"device": 900, "redis": 0, "recomputed": 100}, 0.1
        elif self.stored:
            found, seconds = {"redis": self.gives, "recomputed": 1000 - self.gives}, 0.2
        else:
            found, seconds = {"redis": 0, "recomputed": 1000}, 1.0
        self.device = self.device or not self.stored
        text = "other words" if self.stored and question in self.changed else f"{question} words"
        answer = Answer()
        answer.text, answer.ttft_s, answer.usage = text, seconds, {"prompt_tokens": 1000, "kv_cache": found}
        return answer

    def cool(self) -> int:
        self.log.append("cool")
        self.stored = True
        return 5 << 20

    def forget(self, *tiers: str) -> None:
        self.log.append(f"forget {' '.join(tiers)}")
        self.device = self.device and "device" not in tiers
        self.stored = self.stored and "redis" not in tiers


TALK = Talk([{"messages": name} for name in ("a", "b", "c")], ["a words", "b words", None])


def split(text: str) -> list[int]:
    return [hash(word) for word in text.split()]


def test_a_round_computes_cools_forgets_and_asks_everything_again() -> None:
    server = FakeServer(changed={"b"})
    found = one_round(server, TALK, split)
    assert server.log == [
        "forget device cpu redis", "ask", "ask", "ask", "cool", "forget device cpu", "ask", "ask", "ask",
    ]  # fmt: skip
    assert (found.computed_s, found.hit_s, found.reused, found.redis_bytes) == (1.0, 0.2, 0.9, 5 << 20)
    assert (found.answers, found.equal, found.right_before, found.right_after, found.lost) == (3, 2, 2, 1, 1)
    assert found.same_tokens == pytest.approx(2 / 3)


def test_what_was_not_in_redis_or_was_there_before_is_no_measurement() -> None:
    with pytest.raises(ServerError, match="too few"):
        one_round(FakeServer(gives=500), TALK, split)
    server = FakeServer()
    server.forget = lambda *tiers: None  # type: ignore[method-assign]
    server.stored = True
    with pytest.raises(ServerError, match="new were found"):
        one_round(server, TALK, split)


@pytest.mark.parametrize(
    ("one", "other", "share"), [([1, 2, 3], [1, 2, 4, 5], 0.5), ([], [], 0.0), ([1], [1], 1.0), ([2], [1], 0.0)]
)
def test_answers_agree_up_to_their_first_difference(one: list[int], other: list[int], share: float) -> None:
    assert same_share(one, other) == share


def test_the_questions_of_a_talk_stand_behind_the_same_documents() -> None:
    for talk in (demo_talk(3, 256, 5), demo_talk(4, 256, 5), demo_talk(5, 256, 5), word_talk("s", 300, 5, WORDS)):
        assert len(talk.requests) == len(talk.answers) == 5
        assert len({str(request.get("documents")) for request in talk.requests}) == 1
        firsts = {request["messages"][0]["content"][:200] for request in talk.requests}
        assert len(firsts) == 1 or talk.requests[0].get("documents"), "what is before a question is shared"
    assert demo_talk(3, 256, 5) == demo_talk(3, 256, 5)
    assert demo_talk(3, 256, 5) != demo_talk(4, 256, 5)


def levels(**layers: Any) -> dict[str, Level]:
    found = {"off": ROUND, "layers": replace(ROUND, hit_s=0.1, redis_bytes=1 << 19), "50": replace(ROUND, lost=3)}
    found["layers"] = replace(found["layers"], **layers)
    return {name: Level([one, one]) for name, one in found.items()}


def test_tables_have_every_level_beside_a_prefill_and_beside_dense_kv() -> None:
    page = markdown(levels(), ["a machine"], answers_known=True)
    assert "| TTFT, kv.sparse: layers | from Redis | 0.1 / 0.1 / 0.1 s | 0.100 / **0.100** / 0.100 |" in page
    assert "| TTFT from Redis, against dense KV | layers | 0.1 / 0.1 / 0.1 s | 0.500 / **0.500** / 0.500 |" in page
    assert "| layers | 0.50 / 0.50 / 0.50 | 0.500 / **0.500** / 0.500 | 8/8 | 100 % | 6, 6 | 0 |" in page
    assert [line[5:] for line in level_lines(levels(), answers_known=False)] == [["", ""]] * 3
    assert len(as_json(levels(), [])["levels"]["50"]) == 2
    alone = {"50": Level([ROUND])}
    assert len(comparisons(alone)) == 1
    assert level_lines(alone, answers_known=False)[0][2] == ""


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [({}, ""), ({"redis_bytes": 0.51 * (1 << 20)}, "0.510 of dense"), ({"lost": 1}, "loses 2 answers of 8")],
)
def test_only_the_calibrated_level_is_judged(changed: dict[str, Any], sentence: str) -> None:
    said = misses(levels(**changed))
    assert len(said) == bool(changed)
    assert all(sentence in one for one in said)


def test_the_projects_page_has_a_place_for_both_models() -> None:
    whole = program.PAGE.read_text()
    for model in ("demo", "365m"):
        begin, end = (mark.format(model=model) for mark in (program.BEGIN, program.END))
        assert whole.index(begin) < whole.index(end)
