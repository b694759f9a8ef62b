"""Sampled tokens come back where their text does, and nowhere else."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from chats import KIND, TEXTS, WHOSE, Chats
from hypothesis import given, settings
from hypothesis import strategies as st

from app.answers import turns
from app.answers.memory import MOST_TURNS, AnswerMemory
from app.answers.returns import History
from app.answers.turns import Answer, Conversation
from app.openai.observers import Sampled

ANSWER = "the cat sat there"


def history(*messages: tuple[str, object]) -> History:
    return History([{"role": role, "content": content} for role, content in messages])


SAID = history(("user", "the ball?"), ("assistant", ANSWER), ("user", "and?"))


def test_an_answer_that_was_cut_otherwise_comes_back_as_it_was_sampled(chats: Chats):
    outcomes: list[str] = []
    answers = chats.answers(outcomes=outcomes)
    prompt, sampled = chats.render("the ball?"), chats.letters(ANSWER)
    answers.remember(WHOSE, prompt, [Answer(sampled)], KIND)
    rendered = chats.render("the ball?", ANSWER, "and?")
    assert rendered[: len(prompt) + len(sampled)] != [*prompt, *sampled], "nothing to do"
    spliced = answers.splice(WHOSE, rendered, SAID)
    assert spliced[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    assert chats.text(spliced) == chats.text(rendered)
    assert outcomes == ["spliced"]


def test_all_answers_of_a_conversation_come_back_each_behind_those_before_it(chats: Chats):
    answers = chats.answers()
    turns: list[str] = []
    before: list[int] = []
    for number in range(6):
        turns.append(TEXTS[number % 3])
        prompt = answers.splice(WHOSE, chats.render(*turns))
        assert prompt[: len(before)] == before
        sampled = chats.letters(f"{ANSWER} {number}")
        answers.remember(WHOSE, prompt, [Answer(sampled)], KIND)
        before = [*prompt, *sampled]
        turns.append(f"{ANSWER} {number}")


def test_a_stable_answer_is_left_and_counted(chats: Chats):
    outcomes: list[str] = []
    answers = chats.answers(outcomes=outcomes)
    rendered = chats.render("the ball?", ANSWER, "and?")
    answers.remember(WHOSE, chats.render("the ball?"), [Answer(chats.encode(ANSWER))], KIND)
    assert answers.splice(WHOSE, rendered, SAID) is rendered
    assert answers.splice(WHOSE, rendered, SAID) is rendered
    assert outcomes == ["as_sampled"], "each answer once"


def test_without_splicing_it_is_only_seen(chats: Chats):
    outcomes: list[str] = []
    answers = chats.answers(splices=False, outcomes=outcomes)
    answers.remember(WHOSE, chats.render("the ball?"), [Answer(chats.letters(ANSWER))], KIND)
    rendered = chats.render("the ball?", ANSWER, "and?")
    assert answers.splice(WHOSE, rendered, SAID) is rendered
    assert outcomes == ["retokenized"]


@pytest.mark.parametrize("other", [Conversation("other", "salt"), Conversation("tenant", "another salt")])
def test_nobody_gets_what_was_sampled_for_another(chats: Chats, other: Conversation):
    answers = chats.answers()
    answers.remember(WHOSE, chats.render("the ball?"), [Answer(chats.letters(ANSWER))], KIND)
    answers.remember(other, chats.render("where?"), [Answer(chats.letters(ANSWER))], KIND)
    rendered = chats.render("the ball?", ANSWER, "and?")
    assert answers.splice(other, rendered) is rendered
    assert answers.splice(WHOSE, rendered) != rendered


def test_the_same_text_behind_another_prompt_is_not_that_answer(chats: Chats):
    answers = chats.answers()
    answers.remember(WHOSE, chats.render("the ball?"), [Answer(chats.letters(ANSWER))], KIND)
    rendered = chats.render("the bell?", ANSWER, "and?")
    assert answers.splice(WHOSE, rendered) is rendered


def test_looking_only_counts_nothing_and_learns_nothing(chats: Chats):
    outcomes: list[str] = []
    answers = chats.answers(outcomes=outcomes)
    answers.remember(WHOSE, chats.render("the ball?"), [Answer(chats.letters(ANSWER))], KIND)
    assert answers.splice(WHOSE, chats.render("the ball?", ANSWER, "and?")) is not None
    answers.splice(WHOSE, chats.render("the ball?", "other", "and?"))
    assert outcomes == []
    assert answers.returns.share(KIND) == 1


@pytest.mark.parametrize(
    ("message", "said", "cause"),
    [
        ({"role": "assistant", "content": "the ball"}, "the ball", "client"),
        ({"role": "assistant", "content": "sat there"}, "sat there", "template"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, TEXTS[0], "tool_call"),
        ({"role": "assistant", "content": [{"type": "text", "text": "x"}]}, "x", "client"),
    ],
)
def test_why_an_answer_did_not_come_back_is_counted_once(chats: Chats, message: object, said: str, cause: str):
    outcomes: list[str] = []
    answers = chats.answers(outcomes=outcomes)
    answers.remember(WHOSE, chats.render("the ball?"), [Answer(chats.letters(ANSWER))], KIND)
    rendered = chats.render("the ball?", said, "and?")
    for _ in range(2):
        assert answers.splice(WHOSE, rendered, History([message])) is rendered
    assert outcomes == [cause]
    assert answers.returns.share(KIND) < 1


def test_a_history_of_which_nothing_is_remembered_is_counted(chats: Chats):
    outcomes: list[str] = []
    answers = chats.answers(outcomes=outcomes)
    answers.splice(WHOSE, chats.render("the ball?", ANSWER, "and?"), SAID)
    answers.splice(WHOSE, chats.render("the ball?"), history(("user", "the ball?")))
    assert outcomes == ["not_remembered"]


def test_each_choice_of_a_prompt_may_be_the_one_that_comes_back(chats: Chats):
    answers = chats.answers()
    prompt = chats.render("the ball?")
    texts = [f"{ANSWER} {number}" for number in range(MOST_TURNS)]
    for text in texts:
        answers.remember(WHOSE, prompt, [Answer(chats.letters(text))], KIND)
    for text in texts:
        spliced = answers.splice(WHOSE, chats.render("the ball?", text, "and?"))
        assert spliced[len(prompt) :][: len(chats.letters(text))] == chats.letters(text)


def test_of_two_answers_with_one_text_the_first_stays(chats: Chats):
    answers = chats.answers()
    prompt, rendered = chats.render("the ball?"), chats.render("the ball?", ANSWER, "and?")
    answers.remember(WHOSE, prompt, [Answer(chats.letters(ANSWER))], KIND)
    first = answers.splice(WHOSE, rendered)
    other = [*chats.encode(ANSWER[:5]), *chats.letters(ANSWER[5:])]
    assert chats.text(other) == ANSWER
    assert other != chats.letters(ANSWER)
    answers.remember(WHOSE, prompt, [Answer(other)], KIND)
    assert answers.splice(WHOSE, rendered) == first


def test_a_changed_tool_call_leaves_the_turn_as_it_is_rendered(chats: Chats):
    answers = chats.answers()
    prompt = chats.render("the ball?")
    answers.remember(WHOSE, prompt, [Answer([*chats.letters("so: "), chats.tool, *chats.letters('{"a":1}')])], KIND)
    for said in ('so: <tool_call>{"a": 1}', 'so: {"a":1}', "so: <tool_call>", "<tool_call>so: "):
        rendered = chats.render("the ball?", said, "and?")
        assert answers.splice(WHOSE, rendered) is rendered, said
    spliced = answers.splice(WHOSE, chats.render("the ball?", 'so: <tool_call>{"a":1}', "and?"))
    assert spliced[len(prompt) :][:4] == chats.letters("so: ")


def test_special_tokens_that_were_sampled_as_text_are_not_put_in(chats: Chats):
    answers = chats.answers()
    answers.remember(WHOSE, chats.render("the ball?"), [Answer(chats.letters("so: <tool_call>x"))], KIND)
    rendered = chats.render("the ball?", "so: <tool_call>x", "and?")
    assert chats.tool in rendered
    assert answers.splice(WHOSE, rendered) is rendered


def test_broken_characters_come_back_only_where_the_text_is_the_same(chats: Chats):
    answers = chats.answers()
    prompt = chats.render("the ball?")
    snowman = chats.letters("☃")
    broken = [*chats.letters("a "), *snowman[:-1], *chats.letters("b")]
    answers.remember(WHOSE, prompt, [Answer(broken)], KIND)
    rendered = chats.render("the ball?", chats.said(broken), "and?")
    spliced = answers.splice(WHOSE, rendered)
    assert chats.text(spliced) == chats.text(rendered)
    cut = [*chats.letters("a "), *snowman[:-1]]
    answers.remember(WHOSE, chats.render("where?"), [Answer(cut)], KIND)
    rendered = chats.render("where?", "a ", "and?")  # a stream holds back what is no character yet
    assert answers.splice(WHOSE, rendered) is rendered


def test_an_answer_that_goes_on_is_left_open(chats: Chats):
    answers = chats.answers()
    prompt = chats.render("the ball?")
    answers.remember(WHOSE, prompt, [Answer(chats.letters(ANSWER))], KIND)
    unfinished = chats.render("the ball?", ANSWER, asks=False)[:-2]
    assert unfinished[-1] != chats.end
    assert answers.splice(WHOSE, unfinished) is unfinished
    sampled = chats.letters(" too")
    answers.remember(WHOSE, unfinished, [Answer(sampled)], KIND)
    spliced = answers.splice(WHOSE, chats.render("the ball?", f"{ANSWER} too", "and?"))
    assert spliced[: len(unfinished) + len(sampled)] == [*unfinished, *sampled]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_whatever_is_sampled_the_text_stays_and_no_special_token_comes_or_goes(chats: Chats, data: st.DataObject):
    answers = chats.answers()
    tokens = st.lists(st.integers(0, chats.size - 1), max_size=12)
    text = st.text(alphabet="the cat ☃é<|im_end|>\n", max_size=12)
    turns: list[str] = []
    for _ in range(data.draw(st.integers(1, 4))):
        turns.append(data.draw(text).replace("<|", "<").replace("\x00", ""))
        prompt = answers.splice(WHOSE, chats.render(*turns))
        sampled = data.draw(tokens)
        answers.remember(WHOSE, prompt, [Answer(sampled)], KIND)
        said = chats.said(sampled)
        turns.append(data.draw(st.sampled_from([said, said, said.strip(), said[:-1], ANSWER])))
        rendered = chats.render(*turns, "and?")
        spliced = answers.splice(WHOSE, rendered)
        assert chats.text(spliced) == chats.text(rendered)
        specials = chats.marks.boundaries
        assert [t for t in spliced if t in specials] == [t for t in rendered if t in specials]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_where_tokens_and_text_agree_they_always_come_back(chats: Chats, data: st.DataObject):
    """The naive rule: ids that decode, in their place, to what the client sends."""
    answers = chats.answers()
    prompt = chats.render("the ball?")
    pieces = data.draw(st.lists(st.sampled_from(["the", " cat", "t", "h", "e", " ", "ça", "\n"]), min_size=1))
    sampled = [token for piece in pieces for token in chats.encode(piece)]
    answers.remember(WHOSE, prompt, [Answer(sampled)], KIND)
    spliced = answers.splice(WHOSE, chats.render("the ball?", "".join(pieces), "and?"))
    assert spliced[: len(prompt) + len(sampled)] == [*prompt, *sampled]


def remembered(chats: Chats, answer: Answer) -> list[int] | None:
    """The tokens that are remembered of an answer."""
    answers = chats.answers()
    answers.remember(WHOSE, chats.render("the ball?"), [answer], KIND)
    own = answers.memory.of(WHOSE.tenant)
    if own is None:
        return None
    ((turn,),) = (place.turns for place in own.places.values())
    return list(array("i", turn.ids))[len(chats.encode("assistant\n")) :]


@given(st.integers(0, 18), st.data())
@settings(max_examples=200, deadline=None)
def test_an_answer_that_a_stop_string_cut_comes_back_as_far_as_it_was_sampled(
    chats: Chats, length: int, data: st.DataObject
):
    sampled = [*chats.letters("the ca"), *chats.encode("t sat there☃")]
    whole = chats.said(sampled)
    text = whole[: max(0, len(whole) - length)]
    kept = remembered(chats, Answer(sampled, text))
    first = next((n for n in range(len(sampled), 0, -1) if text.startswith(chats.said(sampled[:n]))), 0)
    if first == 0:
        assert kept is None
        return
    assert kept is not None
    assert chats.said(kept) == text
    assert kept[:first] == sampled[:first]
    other = Answer(sampled, data.draw(st.sampled_from(["other", "the xx"])))
    assert remembered(chats, other) is None


def test_outputs_are_heard_choice_by_choice_and_without_what_ended_them(chats: Chats):
    answers = chats.answers()
    prompt = chats.render("the ball?")
    sampled = Sampled(answers, WHOSE, prompt, KIND)

    def hear(index: int, ids: list[int], finish: str | None = None, stop: object = None) -> None:
        completion = SimpleNamespace(
            index=index, token_ids=ids, text=chats.said(ids), finish_reason=finish, stop_reason=stop
        )
        sampled.hear(SimpleNamespace(outputs=[completion]), "a")  # type: ignore[arg-type]

    hear(0, chats.letters("the"))
    hear(1, chats.letters("a cat"), "length")
    hear(0, [*chats.letters(" ball"), chats.end], "stop")
    hear(2, chats.letters("never ended"))
    hear(3, [chats.end], "stop")
    hear(4, chats.letters("gone"), "abort")
    sampled.end("")
    own = answers.memory.of(WHOSE.tenant)
    assert own is not None
    (place,) = own.places.values()
    head = chats.encode("assistant\n")
    assert [list(array("i", turn.ids)) for turn in place.turns] == [
        [*head, *chats.letters("the ball")],
        [*head, *chats.letters("a cat")],
    ]


@pytest.mark.parametrize(("failed", "places"), [("", 1), ("aborted", 0), ("UnavailableError", 0)])
def test_answers_to_a_prompt_that_failed_are_not_remembered(chats: Chats, failed: str, places: int):
    answers = chats.answers()
    sampled = Sampled(answers, WHOSE, chats.render("the ball?"), KIND)
    completion = SimpleNamespace(
        index=0, token_ids=[*chats.letters("the ball"), chats.end], text="the ball", finish_reason="stop",
        stop_reason=None,
    )  # fmt: skip
    sampled.hear(SimpleNamespace(outputs=[completion]), "a")  # type: ignore[arg-type]
    sampled.end(failed)
    assert isinstance(answers.memory, AnswerMemory)
    assert answers.memory.places == places


def test_a_prompt_without_turns_is_not_remembered(chats: Chats):
    answers = chats.answers()
    answers.remember(WHOSE, chats.encode("the ball"), [Answer(chats.letters(ANSWER))], KIND)
    answers.remember(WHOSE, [], [Answer(chats.letters(ANSWER))], KIND)
    assert isinstance(answers.memory, AnswerMemory)
    assert answers.memory.places == 0


def test_what_would_take_long_to_compare_stays_as_it_was_rendered(chats: Chats, monkeypatch: pytest.MonkeyPatch):
    answers = chats.answers()
    answers.remember(WHOSE, chats.render("the ball?"), [Answer(chats.letters(ANSWER))], KIND)
    rendered = chats.render("the ball?", ANSWER, "and?")
    with monkeypatch.context() as few:
        few.setattr(turns, "MOST_TOKENS_COMPARED", 10)
        assert answers.splice(WHOSE, rendered) is rendered
    assert answers.splice(WHOSE, rendered) != rendered, "with time for it, it is compared"


def test_thousands_of_special_tokens_in_answers_and_prompts_cost_no_lookups(chats: Chats):
    answers = chats.answers()
    many = [chats.tool] * 5000
    answers.remember(WHOSE, chats.render("the ball?"), [Answer(many)], KIND)
    answers.remember(WHOSE, [*many, *chats.render("x")], [Answer([*many, *many])], KIND)
    rendered = chats.render("the ball?", chats.text(many), "and?")
    assert answers.splice(WHOSE, rendered) is rendered
    endless = [chats.start] * 20_000
    assert answers.splice(WHOSE, endless) is endless


def test_a_defect_costs_no_request_and_is_said_once(chats: Chats, monkeypatch: pytest.MonkeyPatch, own_records: Any):
    outcomes: list[str] = []
    answers = chats.answers(outcomes=outcomes)

    def broken(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(answers, "remember", broken)
    for _ in range(2):
        sampled = Sampled(answers, WHOSE, chats.render("the ball?"), KIND)
        completion = SimpleNamespace(index=0, token_ids=[9], text="x", finish_reason="length", stop_reason=None)
        sampled.hear(SimpleNamespace(outputs=[completion]), "a")  # type: ignore[arg-type]
        sampled.end("")
    assert outcomes == ["defect", "defect"]
    assert len(own_records()) == 1


def test_special_tokens_are_compared_as_tokens_not_as_text(chats: Chats):
    answers = chats.answers()
    prompt, written = chats.render("the ball?"), chats.letters("<tool_call>")
    answers.remember(WHOSE, prompt, [Answer([chats.tool, *written])], KIND)
    other_way_round = [*prompt, *written, chats.tool, chats.end, *chats.encode("\n")]
    assert chats.text([chats.tool, *written]) == chats.text([*written, chats.tool])
    assert answers.splice(WHOSE, other_way_round) is other_way_round


def test_what_was_unlike_is_compared_again_when_there_is_a_new_answer(chats: Chats):
    answers = chats.answers()
    prompt, rendered = chats.render("the ball?"), chats.render("the ball?", ANSWER, "and?")
    answers.remember(WHOSE, prompt, [Answer(chats.letters("a cat"))], KIND)
    assert answers.splice(WHOSE, rendered) is rendered
    answers.remember(WHOSE, prompt, [Answer(chats.letters(ANSWER))], KIND)
    assert answers.splice(WHOSE, rendered) != rendered
