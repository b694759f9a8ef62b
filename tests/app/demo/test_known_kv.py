"""What the demo expects of the tiers, and the words that it uses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.demo import documents
from app.demo.known_kv import KnownKV, TokensBySource
from models.training import phrasing, worlds


@given(st.integers(1, 5), st.integers(1, 60), st.integers(1, 60))
def test_the_same_prompt_again_reuses_all_its_blocks_but_the_last_tokens(block, prompt_tokens, answer_tokens):
    known = KnownKV(block)
    prompt, answer = list(range(prompt_tokens)), list(range(100, 100 + answer_tokens))
    assert known.expected(0, prompt) == TokensBySource(recomputed=prompt_tokens)
    known.add_turn(0, prompt, answer)
    whole = (prompt_tokens - 1) // block * block
    assert known.expected(0, prompt) == TokensBySource(device=whole, recomputed=prompt_tokens - whole)
    assert known.expected(1, prompt) == TokensBySource(cpu=whole, recomputed=prompt_tokens - whole)
    known.clear("device")
    assert known.expected(0, prompt) == TokensBySource(cpu=whole, recomputed=prompt_tokens - whole)


@given(st.integers(1, 5), st.integers(1, 60), st.integers(1, 60))
def test_turn_two_reuses_the_answer_but_for_its_last_token(block, prompt_tokens, answer_tokens):
    known = KnownKV(block)
    prompt, answer = list(range(prompt_tokens)), list(range(100, 100 + answer_tokens))
    known.add_turn(0, prompt, answer)
    following = [*prompt, *answer, 500, 501]
    whole = (prompt_tokens + answer_tokens - 1) // block * block
    assert known.expected(1, following) == TokensBySource(cpu=whole, recomputed=len(following) - whole)


@given(st.integers(1, 5), st.integers(1, 60), st.integers(1, 60), st.integers(1, 60))
def test_each_token_comes_from_the_nearest_tier_that_has_it(block, request_tokens, answer_tokens, more_tokens):
    known = KnownKV(block)
    request, answer, more = (
        list(range(start, start + length))
        for start, length in ((0, request_tokens), (100, answer_tokens), (200, more_tokens))
    )
    following = [*request, *answer, *more]
    most = (len(following) - 1) // block * block
    known.copied_to_redis(known.add_turn(0, following, [300]))
    assert known.expected(1, following).redis == 0
    known.clear("device", "cpu")
    assert known.expected(0, following) == TokensBySource(redis=most, recomputed=len(following) - most)
    on_device = len(known.add_turn(0, request, [300]))
    in_cpu = len(known.add_turn(1, request, answer))
    both = {"redis": most - in_cpu, "recomputed": len(following) - most}
    assert known.expected(0, following) == TokensBySource(device=on_device, cpu=in_cpu - on_device, **both)
    assert known.expected(1, following) == TokensBySource(device=in_cpu, **both)
    assert known.expected(2, following) == TokensBySource(cpu=in_cpu, **both)
    known.clear("redis")
    assert known.expected(2, following) == TokensBySource(cpu=in_cpu, recomputed=len(following) - in_cpu)


def test_what_was_not_copied_is_not_expected_from_redis():
    known = KnownKV(2)
    copied = known.add_turn(0, [1, 2, 3, 4, 5], [6])
    known.add_turn(0, [1, 2, 3, 4, 5, 6, 7, 8, 9], [10])
    known.copied_to_redis(copied)
    known.clear("device", "cpu")
    assert known.expected(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == TokensBySource(redis=4, recomputed=5)


def test_homes_jobs_and_owners_are_none_that_the_model_was_trained_on():
    for name, (city, job, _, _) in documents.FACTS.items():
        assert worlds.is_reserved(name, city.removeprefix(f"{name} lives in ").rstrip("."))
        assert worlds.is_reserved(name, job.removeprefix(f"{name} is a ").rstrip("."))
    for sentence in documents.OWNED:
        thing, owner = sentence.removeprefix("The ").rstrip(".").split(" belongs to ")
        assert worlds.is_reserved(thing, owner)


def test_greetings_are_worded_as_the_model_learned_them():
    assert [f" {reply}" for reply in documents.GREETING_REPLIES] == list(phrasing.GREETING_REPLIES)
