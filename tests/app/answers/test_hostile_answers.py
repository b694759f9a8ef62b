"""What a client can make of its answers costs the others nothing: neither memory nor the event loop's time."""

from __future__ import annotations

import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from chats import KIND, WHOSE, Chats

from app.answers import turns
from app.answers.memory import MOST_TURNS, AnswerMemory
from app.answers.returns import History, Returns
from app.answers.turns import Answer, Answers
from app.gate.observed_prompt import Kind
from app.openai.observers import Sampled

ANSWER = "the cat sat there"
SAID = History(
    [{"role": role, "content": text} for role, text in (("user", "ball?"), ("assistant", ANSWER), ("user", "and?"))]
)


class CountingTokenizer:
    """Counts the tokens that it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.decoded = self.calls = 0

    def decode(self, ids: list[int], **options: Any) -> Any:
        self.decoded += len(ids)
        self.calls += 1
        return self._tokenizer.decode(ids, **options)

    def encode(self, text: str, **options: Any) -> Any:
        return self._tokenizer.encode(text, **options)


def hear(sampled: Sampled, index: int, ids: list[int], text: str, finish: str, stop: object = None) -> None:
    completion = SimpleNamespace(index=index, token_ids=ids, text=text, finish_reason=finish, stop_reason=stop)
    sampled.hear(SimpleNamespace(outputs=[completion]), "a")  # type: ignore[arg-type]


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="what objects weigh is CPython's")
def test_answers_of_special_tokens_alone_weigh_no_more_than_counted(chats: Chats):
    tracemalloc.start()
    try:
        answers = chats.answers(most_bytes=1 << 21)
        for number in range(500):
            forced = [int(str(chats.tool)) for _ in range(1000)]
            if number % 2:
                forced = [int(str(1000 + chats.tool)) for _ in range(1000)]
            prompt = [number, *chats.render("x")]
            answers.remember(WHOSE, prompt, [Answer(forced)], Kind("tenant", thinks=bool(number % 2)))
        assert answers.memory.forgotten > 0
        assert tracemalloc.get_traced_memory()[0] <= answers.memory.nbytes
    finally:
        tracemalloc.stop()


def test_a_turn_with_the_beginning_of_another_in_it_leaves_those_behind_it_findable(chats: Chats):
    answers = chats.answers()
    prompt = chats.render("the ball?")
    odd = [*chats.letters("the "), chats.start, *chats.letters("cat sat")]
    answers.remember(WHOSE, prompt, [Answer(odd)], KIND)
    ended = [chats.end, *chats.encode("\n")]
    rendered = [*prompt, *chats.encode("the "), chats.start, *chats.encode("cat sat"), *ended, *chats.render("and?")]
    spliced = answers.splice(WHOSE, rendered)
    assert spliced[: len(prompt) + len(odd)] == [*prompt, *odd]
    answers.remember(WHOSE, spliced, [Answer(chats.letters(ANSWER))], KIND)
    later = [*rendered, *chats.encode(ANSWER), *ended, *chats.render("so?")]
    both = answers.splice(WHOSE, later)
    assert both[: len(spliced) + len(ANSWER)] == [*spliced, *chats.letters(ANSWER)]
    assert chats.text(both) == chats.text(later)


@pytest.mark.parametrize("compared", [0, 10, 30])
def test_of_what_was_not_compared_nothing_is_learned(chats: Chats, monkeypatch: pytest.MonkeyPatch, compared: int):
    outcomes: list[str] = []
    answers = chats.answers(outcomes=outcomes)
    answers.remember(WHOSE, chats.render("ball?"), [Answer(chats.letters(ANSWER))], KIND)
    rendered = chats.render("ball?", ANSWER, "and?")
    with monkeypatch.context() as few:
        few.setattr(turns, "MOST_TOKENS_COMPARED", compared)
        assert answers.splice(WHOSE, rendered, SAID) is rendered
    assert outcomes == ["not_remembered"]
    assert answers.returns.share(KIND) == 1.0
    assert answers.splice(WHOSE, rendered, SAID) != rendered, "with time for it, it comes back"
    assert outcomes[1:] == ["spliced"]


@pytest.mark.parametrize("cut", [0, 3, 14])
def test_many_long_answers_that_a_stop_string_ended_are_not_all_decoded(chats: Chats, cut: int):
    counting = CountingTokenizer(chats.tokenizer)
    answers = Answers(counting, chats.marks, AnswerMemory(1 << 26), Returns("auto"), True, lambda outcome: None)
    sampled = Sampled(answers, WHOSE, chats.render("x"), KIND)
    for index in range(128):
        said = f"{index:03d}" + "ab" * 2000
        hear(sampled, index, chats.letters(said), said[: len(said) - cut], "stop", "stop here")
    sampled.end("")
    assert answers.memory.places == (cut < 14), "the first ones are, where little was cut"
    assert 0 < counting.decoded < 2 * turns.MOST_TOKENS_COMPARED


@pytest.mark.parametrize("between", ["", "x"])
def test_many_texts_between_special_tokens_cost_no_more_than_one_long_text(chats: Chats, between: str):
    counting = CountingTokenizer(chats.tokenizer)
    answers = Answers(counting, chats.marks, AnswerMemory(1 << 26), Returns("auto"), True, lambda outcome: None)
    forced = [chats.tool, *chats.encode(between)] * 8000
    prompt = chats.render("x")
    answers.remember(WHOSE, prompt, [Answer(forced)], KIND)
    rendered = [*prompt, *chats.encode("y"), *forced, chats.end, *chats.encode("\n"), *chats.render("and?")]
    assert answers.splice(WHOSE, rendered) is rendered
    assert counting.calls <= turns.MOST_TOKENS_COMPARED // 16


def test_as_many_answers_as_a_place_has_are_looked_at_and_the_prompt_is_hashed_once(
    chats: Chats, monkeypatch: pytest.MonkeyPatch
):
    hashed: list[str] = []
    name = turns._hash_of
    monkeypatch.setattr(turns, "_hash_of", lambda salt: hashed.append(salt) or name(salt))
    answers = chats.answers()
    sampled = Sampled(answers, WHOSE, chats.render("x"), KIND)
    for index in range(128):
        text = f"{index:03d}"
        hear(sampled, index, chats.letters(text), text, "length")
    sampled.end("")
    assert len(hashed) == 1
    own = answers.memory.of(WHOSE.tenant)
    assert own is not None
    (place,) = own.places.values()
    assert len(place.turns) == MOST_TURNS
