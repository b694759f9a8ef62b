"""Estimates of answers' lengths: what they learn, what they cannot, and what they cost."""

from __future__ import annotations

import sys
import tracemalloc
from math import log2
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.scheduling.answer_lengths import FIRST_GUESS, AnswerLengths, LengthEstimate
from kvmanager.segments.keys import BlockHash, block_hashes
from tests.quantities import up_to

SEGMENT = 4


def chain(seed: int, blocks: int, prefix: list[BlockHash] | None = None) -> list[BlockHash]:
    """Hashes of a prompt's blocks, behind those of a prefix."""
    rng = Random(seed)
    return [*(prefix or []), *(BlockHash(rng.randbytes(32)) for _ in range(blocks))]


def answered(lengths: AnswerLengths, hashes: list[BlockHash], tokens: int, cut_off: bool = False) -> None:
    prompt = 32 * len(hashes)
    lengths.learn(hashes, prompt, lengths.estimate(hashes, prompt), tokens, cut_off)


def expected(lengths: AnswerLengths, hashes: list[BlockHash]) -> LengthEstimate:
    return lengths.estimate(hashes, 32 * len(hashes))


def test_before_anything_is_known_every_answer_is_expected_to_be_as_long():
    assert expected(AnswerLengths(SEGMENT, 99), chain(1, 9)) == LengthEstimate(FIRST_GUESS, FIRST_GUESS, 0)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 7, 8, 9, 30])
def test_a_prompt_that_goes_on_from_another_has_answers_like_it(blocks: int):
    lengths = AnswerLengths(SEGMENT, 9999)
    short, long = chain(1, blocks), chain(2, blocks)
    for _ in range(8):
        answered(lengths, short, 8)
        answered(lengths, long, 1024)
    for more in (0, 1, 3, 40):
        brief, lengthy = (expected(lengths, chain(9, more, prefix)) for prefix in (short, long))
        assert brief.tokens < 20
        assert lengthy.tokens > 400
        assert brief.known_blocks == lengthy.known_blocks == blocks


def test_a_system_prompt_that_all_share_does_not_hide_what_the_prompts_length_tells():
    lengths = AnswerLengths(SEGMENT, 9999)
    system = chain(0, SEGMENT)
    for seed in range(1, 100):
        answered(lengths, chain(seed, 2, system), 16)
        answered(lengths, chain(-seed, 60, system), 512)
    assert expected(lengths, chain(1000, 2, system)).tokens < 32
    assert expected(lengths, chain(1000, 60, system)).tokens > 256


def test_an_answer_that_was_cut_off_lengthens_an_estimate_and_never_shortens_it():
    lengths = AnswerLengths(SEGMENT, 999)
    prompt = chain(1, 6)
    before = expected(lengths, prompt).log2_tokens
    for _ in range(30):
        answered(lengths, prompt, 1, cut_off=True)
    assert expected(lengths, prompt).log2_tokens == pytest.approx(before)
    for _ in range(30):
        answered(lengths, prompt, 4096, cut_off=True)
    assert expected(lengths, prompt).tokens > 2000


def test_what_is_forgotten_first_is_what_was_not_written_for_the_longest_time_and_children_go_before_parents():
    lengths = AnswerLengths(SEGMENT, 8)
    old, new = chain(1, 3 * SEGMENT), chain(2, 4 * SEGMENT)
    answered(lengths, old, 8)
    answered(lengths, new, 8)
    assert len(lengths) == 8
    assert expected(lengths, new).known_blocks == len(new)
    assert 0 < expected(lengths, old).known_blocks < len(old)
    answered(lengths, chain(3, 99 * SEGMENT), 8)
    assert len(lengths) == 8
    assert expected(lengths, new).known_blocks == 0


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), up_to(1e9), st.booleans()), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 30),
)
def test_estimates_stay_within_what_was_seen_and_memory_within_its_bound(answers, segment, most):
    lengths = AnswerLengths(segment, most)
    least = greatest = FIRST_GUESS
    for seed, blocks, tokens, cut_off in answers:
        hashes = chain(seed, blocks)
        estimate = expected(lengths, hashes)
        # A node is a mean of differences, so an estimate may lie beyond what was seen by as much as priors differ.
        spread = greatest - least
        assert least - spread - 1e-6 <= estimate.log2_tokens <= greatest + spread + 1e-6
        assert estimate.tokens >= 1
        assert estimate.known_blocks <= blocks
        lengths.learn(hashes, 32 * blocks, estimate, tokens, cut_off)
        length = log2(max(1.0, tokens))
        least, greatest = min(least, length), max(greatest, length, estimate.log2_tokens)
        assert len(lengths) <= most


def test_prompts_of_one_text_under_two_salts_know_nothing_of_each_other():
    """Salts hold the tenant (`kvmanager.segments.keys.cache_salt`)."""
    lengths = AnswerLengths(SEGMENT, 9999)
    tokens = list(range(1000))
    mine, others = block_hashes(tokens, 32, "a" * 64), block_hashes(tokens, 32, "b" * 64)
    for _ in range(20):
        answered(lengths, mine, 4000)
    assert expected(lengths, mine).known_blocks == len(mine)
    assert expected(lengths, others).known_blocks == 0


def test_a_request_costs_its_segments_and_not_its_blocks():
    lengths = AnswerLengths(16, 10**6)
    answered(lengths, chain(1, 4096), 9)
    assert len(lengths) == 4096 // 16 + 1
    looked_at = list(lengths._path(chain(1, 4096)))
    assert len(looked_at) <= 4096 // 16 + 16
    assert list(lengths._path(chain(2, 4096))) == list(range(1, 17))


def test_a_node_takes_some_330_bytes():
    nodes = 20_000
    chains = [chain(seed, 40) for seed in range(nodes // 10)]
    estimate = LengthEstimate(FIRST_GUESS, FIRST_GUESS)
    tracemalloc.start()
    try:
        lengths = AnswerLengths(4, nodes)
        for hashes in chains:
            lengths.learn(hashes, 32 * len(hashes), estimate, 9.5)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    key_bytes = sys.getsizeof(chains[0][0])  # the request's own, until it has ended
    assert held / len(lengths) + key_bytes < 350


def test_numbers_below_one_are_refused():
    for segment, nodes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one"):
            AnswerLengths(segment, nodes)
