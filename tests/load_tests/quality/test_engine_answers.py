"""Answers of the probe model in the engine: which questions, how answers are judged, and what falls short."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from kernels.blend import choice
from load_tests.quality.cases import PROBE
from load_tests.quality.engine import __main__ as program
from load_tests.quality.engine.asking import rows_by_chance
from load_tests.quality.engine.judge import ARMS, BLENDED, NAIVE, RANDOM, WHOLE, Answer, Arm, divergences, judged
from load_tests.quality.engine.questions import Question, questions


def test_questions_are_so_many_and_end_where_the_answer_begins() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(PROBE)
    asked = list(questions(tokenizer, 7, 256, 5))
    assert len(asked) == 7
    assert asked[0].first
    assert 2 <= sum(one.first for one in asked) < 7
    for one in asked:
        assert tokenizer.decode(one.ids).endswith("<|assistant|>")
        assert all(tokenizer.decode(one.ids[chunk.start]) == "<|doc|>" for chunk in one.chunks)
        assert " city is " in tokenizer.decode(one.answer)
    behind = [one.ids[: one.chunks[-1].stop] for one in asked]
    assert all(one.first or behind[at] == behind[at - 1] for at, one in enumerate(asked))


STEP = {1: math.log(0.8), 2: math.log(0.2)}
OTHER = {1: math.log(0.4), 2: math.log(0.6)}


def test_steps_are_compared_as_long_as_both_have_read_the_same() -> None:
    whole = Answer([1, 1, 1], [STEP, STEP, STEP])
    assert divergences(whole, whole) == [0.0, 0.0, 0.0]
    kl = 0.8 * math.log(2) + 0.2 * math.log(1 / 3)
    assert divergences(Answer([1, 2, 1], [STEP, OTHER, OTHER]), whole) == pytest.approx([0.0, kl])
    assert divergences(Answer([2], [{2: 0.0}]), Answer([1], [STEP]))[0] > 10, "a token that is not said is unlikely"


class FakeAsking:
    """The blend answers as the prefill; the others answer nothing."""

    def answers(self, question: Question) -> Mapping[str, Answer]:
        right = Answer(question.answer, [STEP] * len(question.answer))
        wrong = Answer([9] * len(question.answer), [OTHER] * len(question.answer))
        return {WHOLE: right, BLENDED: right, RANDOM: wrong, NAIVE: wrong}


def test_every_arm_is_judged_on_every_question_and_the_table_says_it() -> None:
    found = judged(FakeAsking(), [Question([1], [], [1, 1], True)] * 3)
    assert [found[name].share for name in ARMS] == [1.0, 1.0, 0.0, 0.0]
    assert len(found[NAIVE].divergences) == 3, "after the first difference nothing is compared"
    assert program.misses(found) == []
    text = program.lines(found)
    assert "| blended | 3/3 |" in text
    assert "| 0.0 | 0.00000 | 0.000 | ≤ 1 below, KL ≤ 0.002 |" in text


def arms(blended: int = 100, kl: float = 0.001, random: int = 80, naive: int = 60) -> dict[str, Arm]:
    right = {WHOLE: 100, BLENDED: blended, RANDOM: random, NAIVE: naive}
    return {name: Arm([at < count for at in range(100)], [kl]) for name, count in right.items()}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"blended": 98}, "2.0 points below a prefill's"),
        ({"kl": 0.003}, "KL of 0.00300"),
        ({"random": 86}, "as many random tokens: 14.0 points"),
        ({"naive": 71}, "none of the reused tokens: 29.0 points"),
    ],
)
def test_each_target_is_judged_by_itself(changed: dict[str, Any], sentence: str) -> None:
    assert program.misses(arms()) == []
    (said,) = program.misses(arms(**changed))
    assert sentence in said


def test_rows_by_chance_are_as_many_and_others() -> None:
    change, reused = torch.arange(100.0), torch.ones(100, dtype=torch.bool)
    reused[:10] = False
    top = choice.rows_to_compute(change, reused, 0.1)
    with rows_by_chance(1):
        drawn = choice.rows_to_compute(change, reused, 0.1)
    assert len(drawn) == len(top) == 19
    assert drawn[:10].tolist() == list(range(10))
    assert drawn.tolist() != top.tolist()
    assert choice.rows_to_compute(change, reused, 0.1).tolist() == top.tolist()


def test_the_projects_page_has_a_place_for_the_table() -> None:
    whole = program.PAGE.read_text()
    assert whole.index(program.BEGIN) < whole.index(program.END_MARK)
