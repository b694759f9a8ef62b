"""What a body asks for, apart from its conversation: the model by another name, more tokens than there are, nulls.

A model's other names (`http.model_aliases`) are patterns as shells have them. The model's own name takes the place of
what was asked for, so KV is found under it whatever a client calls the model.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

from vllm.exceptions import VLLMValidationError

Body = dict[str, Any]

LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
GapMarks = tuple[str, str, str]
"""What stands before a gap's prefix, before its suffix, and where it is filled."""
_GAP_MARKS: tuple[GapMarks, ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
_OF_HOSTED_TOOLS = ("web_search_call", "file_search_call", "code_interpreter_call", "computer_call")
_GREEDY = 1e-5
"""Temperature below which vLLM takes the likeliest token."""
_LEAST_BUDGET = 1024
"""Tokens of thinking that vLLM takes as a budget."""


def is_alias(name: object, aliases: Sequence[str]) -> bool:
    """Whether a name is one of the patterns'."""
    return isinstance(name, str) and any(fnmatchcase(name, alias) for alias in aliases)


def require_model(body: Body) -> None:
    """Raise VLLMValidationError (400) for a body that names no model."""
    if not body.get("model"):
        raise VLLMValidationError("`model` is missing: `GET /v1/models` lists what there is.", parameter="model")


def hold_to_context(body: Body, most_tokens: int) -> None:
    """An answer's limit beyond the context is the context's: vLLM holds it to what the prompt leaves.

    A budget for thinking that was below the limit stays below it.
    """
    thinking = body.get("thinking")
    for name in LIMITS:
        limit: Any = body.get(name)
        if not _is_number(limit) or limit <= most_tokens:
            continue
        body[name] = most_tokens
        budget: Any = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
        if isinstance(thinking, dict) and _is_number(budget) and most_tokens <= budget < limit:
            room = {**thinking, "budget_tokens": most_tokens - 1}
            body["thinking"] = room if most_tokens > _LEAST_BUDGET else {"type": "adaptive"}


def gap_marks(known: Collection[str]) -> GapMarks | None:
    """The special tokens by which a model that was trained to fill gaps is told of one; None: it was not.

    `known`: all tokens of its tokenizer, as texts.
    """
    return next((marks for marks in _GAP_MARKS if all(mark in known for mark in marks)), None)


def fill_gap(body: Body, marks: GapMarks | None) -> None:
    """A completion's `suffix` goes into its prompt, prefix first. Raises VLLMValidationError (400) where it cannot."""
    suffix = body.pop("suffix", None)
    if suffix in (None, ""):
        return
    if marks is None:
        raise VLLMValidationError(
            "`suffix` is not possible: the model has no tokens for a gap. Send what comes before it as `prompt`.",
            parameter="suffix",
        )
    if not isinstance(suffix, str) or not isinstance(body.get("prompt"), str):
        raise VLLMValidationError("`suffix` goes with a `prompt` that is one text.", parameter="suffix")
    before, behind, gap = marks
    body["prompt"] = f"{before}{body['prompt']}{behind}{suffix}{gap}"


def let_greedy_answer_often(body: Body) -> None:
    """Several answers at temperature 0 are the likeliest token each time: vLLM refuses them by that name only."""
    many: Any = body.get("n")
    temperature = body.get("temperature")
    is_greedy = (
        isinstance(temperature, int | float) and not isinstance(temperature, bool) and 0 <= temperature < _GREEDY
    )
    if _is_number(many) and many > 1 and is_greedy and not body.get("use_beam_search"):
        body.update({"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0})


def without_nulls(body: Body) -> None:
    """A null says what leaving the field out says."""
    for name in [name for name, value in body.items() if value is None]:
        del body[name]


def without_hints_of_hosted_tools(body: Body) -> None:
    """Drop what Responses ask to be told of tools that do not run here, and which computers to use."""
    body.pop("service_tier", None)
    if isinstance(body.get("include"), list):
        body["include"] = [one for one in body["include"] if not str(one).startswith(_OF_HOSTED_TOOLS)]


def _is_number(value: Any) -> bool:
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
