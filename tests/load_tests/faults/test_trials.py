"""Trials without a server: what blended ones ask and store, and how answers are judged."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from configs.model_folder import DEMO_MODEL, PROJECT_ROOT
from load_tests.faults import trial as trials
from load_tests.faults.catalogue import BLEND_FAULTS, FAULTS, PAIRED_FAULTS, SURROUNDING_FAULTS, Fault
from load_tests.faults.prompts import (
    AFTER,
    CHUNKS,
    PHASES,
    STRUCK,
    UNDER,
    TrialPrompts,
    chunked_prompts,
    document_token,
    plain_prompts,
)
from load_tests.faults.streams import Stream

DOC = 6
WORDS = list(range(100, 20_000))
PROMPTS = chunked_prompts(Random(3), WORDS, DOC, 5)


def chunks_of(prompt: list[int]) -> list[list[int]]:
    """What begins with the separator, question included."""
    starts = [place for place, token in enumerate(prompt) if token == DOC] + [len(prompt)]
    return [prompt[start:end] for start, end in itertools.pairwise(starts)]


def test_blended_prompts_hold_stored_documents_in_orders_of_their_own() -> None:
    prompts = [prompt for phase in PHASES for prompt in PROMPTS.by_phase[phase]]
    assert {len(own) for own in PROMPTS.by_phase.values()} == {5}
    for prompt in prompts:
        *documents, question = chunks_of(prompt)
        assert len(documents) == CHUNKS
        assert all(document in PROMPTS.stored for document in documents)
        assert len(question) < 64  # the shortest chunk by default
        assert prompt[0] != DOC  # no document is a prompt's own prefix
    assert len({tuple(map(tuple, chunks_of(prompt)[:-1])) for prompt in prompts}) == len(prompts)
    assert any(len(document) % 32 for document in PROMPTS.stored)


def test_only_blended_requests_say_so() -> None:
    assert PROMPTS.body(1.0) == {"kv_cache": {"fidelity": "blended", "recompute_ratio": 1.0}}
    plain = plain_prompts(WORDS, 3)
    assert plain.body(1.0) == {}
    assert plain.stored == plain.by_phase[UNDER] == plain.by_phase[AFTER]


def test_the_demo_model_has_a_token_that_begins_documents(tmp_path: Path) -> None:
    assert document_token(PROJECT_ROOT / DEMO_MODEL) == DOC
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 1, "content": "<s>"}]}))
    with pytest.raises(ValueError, match=r"has no token <\|doc\|>"):
        document_token(tmp_path)


def trial_of(prompts: TrialPrompts) -> trials.Trials:
    """Without a server: only its judgement is asked."""
    one = object.__new__(trials.Trials)
    one._prompts = prompts
    one._answers = {phase: [[number, phase_number] for number in range(2)] for phase_number, phase in enumerate(PHASES)}
    return one


def said(prompts: TrialPrompts, fault: Fault, when: str, answer: list[int], **how: Any) -> list[str]:
    outcome = trials.Outcome(fault.part, fault.name)
    good = trial_of(prompts)._answers[when if prompts.blended else PHASES[0]][1]
    streams = [Stream([], answer, **{"ended": True, **how}), Stream([], good, ended=True)]
    trial_of(prompts)._judge(outcome, fault, streams, when)
    return outcome.problems


def test_a_blended_answer_is_held_against_its_own_phases() -> None:
    (fault, *_) = BLEND_FAULTS
    assert said(PROMPTS, fault, STRUCK, [0, 1]) == []
    assert said(PROMPTS, fault, STRUCK, [0, 0]) == ["when it struck: wrong tokens"]
    assert said(PROMPTS, fault, STRUCK, [0, 1], error="gone") == ["when it struck: gone (after 2 tokens)"]
    assert said(plain_prompts(WORDS, 2), FAULTS[0], STRUCK, [0, 0]) == []


def test_where_not_all_is_computed_anew_only_answers_under_the_fault_are_exact() -> None:
    (fault,) = [one for one in BLEND_FAULTS if one.ratio < 1]
    assert said(PROMPTS, fault, UNDER, [0, 0]) == ["under it: wrong tokens"]
    assert said(PROMPTS, fault, AFTER, [7, 7]) == []
    assert said(PROMPTS, fault, AFTER, [7]) == ["after it: the stream ended without an error after 1 tokens"]
    assert said(PROMPTS, replace(fault, ratio=1.0), AFTER, [7, 7]) == ["after it: wrong tokens"]


def test_streams_that_a_fault_takes_may_break_but_have_no_wrong_token_and_none_breaks_afterwards() -> None:
    (fault,) = [one for one in SURROUNDING_FAULTS if (one.part, one.name) == ("ingress", "killed")]
    prompts = plain_prompts(WORDS, 2)
    for when in (STRUCK, UNDER):
        assert said(prompts, fault, when, [0], error="gone", ended=False) == []
        assert said(prompts, fault, when, [1], error="gone", ended=False) == [f"{when}: wrong tokens"]
        assert said(prompts, replace(fault, breaks=False), when, [0], error="gone", ended=False) != []
    assert said(prompts, fault, AFTER, [0], error="gone", ended=False) == ["after it: gone (after 1 tokens)"]


def test_a_fault_that_ends_what_it_should_have_spared_is_seen() -> None:
    fault = SURROUNDING_FAULTS[0]
    one: Any = trial_of(plain_prompts(WORDS, 2))
    one._server = SimpleNamespace(processes=lambda title: [SimpleNamespace(pid=7)] if title == fault.spares else [])
    assert one._spared(fault) == {7}
    assert one._spared(FAULTS[0]) == set()


def test_each_fault_has_a_name_of_its_own() -> None:
    faults = (*FAULTS, *SURROUNDING_FAULTS, *PAIRED_FAULTS, *BLEND_FAULTS)
    assert len({(fault.part, fault.name) for fault in faults}) == len(faults)
