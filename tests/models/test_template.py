"""The chat template: append-only on token ids, and the same text however the documents arrive."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.training import curriculum, worlds
from models.training.dialogue import compose, encode, question_about
from models.training.phrasing import GREETING_REPLIES
from models.training.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
DOCUMENTS = [{"title": "People", "text": "Anna lives in Paris."}, {"text": "The red ball belongs to Anna."}]
SYSTEMS: list[list[dict[str, str]]] = [
    [],
    [{"role": "system", "content": "Anna lives in Paris.\nThe red ball belongs to Anna."}],
    [{"role": "developer", "content": " Use only these documents."}],
]


def render(messages: list[dict[str, str]], prompt: bool, documents: list[dict[str, str]] | None = None) -> list[int]:
    arguments: dict[str, Any] = {"documents": documents, "add_generation_prompt": prompt, "return_dict": False}
    ids = TOKENIZER.apply_chat_template(messages, tokenize=True, **arguments)
    assert isinstance(ids, list)
    return ids


def assert_append_only(
    system: list[dict[str, str]], questions: list[str], answers: list[list[int]], documents: list[dict[str, str]] | None
) -> None:
    """`answers` are generated token ids; each turn's prompt + answer + end must be a prefix of the next prompt."""
    messages = list(system)
    before: list[int] = []
    for index, question in enumerate(questions):
        messages.append({"role": "user", "content": question})
        prompt = render(messages, True, documents)
        assert prompt[: len(before)] == before
        before = [*prompt, *answers[index], TOKENIZER.eos_token_id]
        messages.append({"role": "assistant", "content": TOKENIZER.decode(answers[index])})


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_prompt_and_answer_are_a_token_prefix_of_the_next_prompt(
    system: list[dict[str, str]], documents: list[dict[str, str]] | None
) -> None:
    texts = [" Anna lives in Paris.", " The red ball is with Anna in Paris.", *GREETING_REPLIES, " Zürich 北京."]
    answers = [TOKENIZER.encode(text, add_special_tokens=False) for text in texts]
    questions = [f"Where does Anna live? {number} ü" for number in range(len(texts))]
    assert_append_only(system, questions, answers, documents)


@given(st.lists(st.tuples(st.text(), st.text()), min_size=2, max_size=4))
def test_append_only_for_any_text_after_the_leading_space(turns: list[tuple[str, str]]) -> None:
    # What a trained answer looks like: one space, then anything.  Canonical ids, as greedy decoding of words gives.
    answers = [TOKENIZER.encode(f" {answer}", add_special_tokens=False) for _, answer in turns]
    assert_append_only([], [question for question, _ in turns], answers, DOCUMENTS)


def test_a_stripped_answer_renders_like_the_generated_one() -> None:
    question = {"role": "user", "content": "Where does Anna live?"}
    kept = render([question, {"role": "assistant", "content": " Anna lives in Paris."}], False)
    stripped = render([question, {"role": "assistant", "content": "Anna lives in Paris."}], False)
    assert kept == stripped


def test_documents_may_carry_text_or_content() -> None:
    user = [{"role": "user", "content": "Hello!"}]
    expected = render(user, True, [{"text": "Anna lives in Paris."}])
    assert render(user, True, [{"content": "Anna lives in Paris."}]) == expected


@pytest.mark.parametrize("seed", range(30))
def test_training_sees_exactly_what_the_template_renders(seed: int) -> None:
    rng = Random(seed)
    world = worlds.generate(rng, rng.choice((32, 64, 200)))
    kinds = ("city", "where", "unknown person", "unknown thing", "missing", "unanswerable", "tell", "talk")
    dialogue = compose(rng, world, [question_about(rng, world, kind) for kind in kinds])
    ids, weights = encode(dialogue, TOKENIZER, curriculum.key_ids(TOKENIZER))
    assert ids == render(dialogue.messages(), False, dialogue.documents or None)
    assert len(ids) == len(weights)
