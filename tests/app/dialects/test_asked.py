"""What a body asks for beside its conversation, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from app.dialects.asked import fill_gap, gap_marks, hold_to_context, is_alias

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def test_a_model_that_fills_gaps_is_told_of_one():
    assert gap_marks({"a", *MARKS}) == MARKS
    assert gap_marks({"a", *MARKS[:2]}) is None
    body = {"prompt": "def f(", "suffix": "): pass"}
    fill_gap(body, MARKS)
    assert body == {"prompt": "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>"}


@pytest.mark.parametrize("suffix", [None, ""])
def test_no_suffix_is_none(suffix: Any):
    body = {"prompt": [5], "suffix": suffix}
    fill_gap(body, None)
    assert body == {"prompt": [5]}


@pytest.mark.parametrize(
    ("body", "marks"),
    [
        ({"prompt": "a", "suffix": "b"}, None),
        ({"prompt": [5], "suffix": "b"}, MARKS),
        ({"prompt": "a", "suffix": 5}, MARKS),
    ],
)
def test_a_suffix_that_cannot_be_is_refused_by_its_name(body: dict[str, Any], marks: Any):
    with pytest.raises(VLLMValidationError, match="`suffix`"):
        fill_gap(body, marks)


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"max_tokens": 9000}, {"max_tokens": 4096}),
        ({"max_tokens": 4096}, {"max_tokens": 4096}),
        ({"max_tokens": 9000.0}, {"max_tokens": 4096}),
        ({"max_tokens": True, "max_output_tokens": "x"}, {"max_tokens": True, "max_output_tokens": "x"}),
        (
            {"max_tokens": 9000, "thinking": {"type": "enabled", "budget_tokens": 8999}},
            {"max_tokens": 4096, "thinking": {"type": "enabled", "budget_tokens": 4095}},
        ),
        (
            {"max_tokens": 9000, "thinking": {"type": "enabled", "budget_tokens": 9000}},
            {"max_tokens": 4096, "thinking": {"type": "enabled", "budget_tokens": 9000}},
        ),
    ],
)
def test_a_limit_is_held_to_the_context_and_nothing_else_changes(given: dict[str, Any], held: dict[str, Any]):
    hold_to_context(given, 4096)
    assert given == held


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("claude-haiku-4", True),
        ("claude-haiku-", True),
        ("Claude-haiku-4", False),
        ("x", False),
        (5, False),
        (None, False),
    ],
)
def test_a_name_is_a_patterns_or_not(name: Any, is_one: bool):
    assert is_alias(name, ["claude-haiku-*", "gpt-?"]) == is_one
