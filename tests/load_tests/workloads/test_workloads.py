"""Workloads: which request comes back, how large the working set is, what the makers promise and what they refuse."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from load_tests.simulator.trace import TraceError
from load_tests.workloads import (
    WORKLOADS,
    Message,
    Request,
    Words,
    Workload,
    conversation_trace,
    long_document_qa,
    multi_round_qa,
    parameters,
    rearranged_chunks,
    shared_prefix_groups,
    straggler_burst,
    with_working_set,
    working_set_tokens,
)
from load_tests.workloads.prefixes import mark_returning
from load_tests.workloads.words import WORDS

WORD_TOKENS = Words(lambda text: len(text.split()))
"""A tokenizer for which every word is a token."""
LETTER_TOKENS = Words(len)
SMALL = {
    "long-document-qa": {"documents": 3, "document_tokens": 60, "question_tokens": 4, "answer_tokens": 5},
    "multi-round-qa": {"users": 3, "system_tokens": 10, "history_tokens": 80, "rounds": 3, "answer_tokens": 7},
    "shared-prefix-groups": {"groups": 4, "prompts_per_group": 2, "system_tokens": 40, "question_tokens": 9,
                             "rates": (1, 4), "stage_s": 8.0},
    "straggler-burst": {"bursts": 2, "short_requests": 5, "long_requests": 2, "system_tokens": 20, "short_tokens": 3,
                        "long_tokens": 90},
    "conversation-trace": {"requests": 6, "block_tokens": 8},
    "rearranged-chunks": {"documents": 8, "chunks": 3, "document_tokens": 60, "shortest_document_tokens": 30,
                          "system_tokens": 9, "shortest_system_tokens": 5, "question_tokens": 6,
                          "shortest_question_tokens": 2, "answer_tokens": 4},
}  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    """Two conversations of two turns behind one system prompt, and a repeat."""
    rows = [
        (0, 1100, 200, [0, 1, 2]),
        (1000, 900, 20, [0, 3]),
        (2500, 1700, 10, [0, 1, 2, 4]),
        (2500, 1030, 0, [0, 3, 5]),
        (9000, 1100, 200, [0, 1, 2]),
        (9500, 600, 64, [7, 8]),
    ]
    file = tmp_path / "trace.jsonl"
    fields = ("timestamp", "input_length", "output_length", "hash_ids")
    file.write_text("".join(json.dumps(dict(zip(fields, row, strict=True))) + "\n" for row in rows))
    return file


@pytest.fixture
def make(trace):
    def make(name, seed=0, **chosen):
        also = {"trace": trace} if name == "conversation-trace" else {}
        return WORKLOADS[name](random.Random(seed), WORD_TOKENS, **{**SMALL[name], **also, **chosen})

    return make


def written_out(requests, characters_per_token):
    """Each prompt, and the prompt with its answer, as one string. Answers are as long as asked for, all different."""
    answers = {}
    for request in requests:
        prompt = "".join(
            answers[request.session, place] if message.content is None else f"\n{message.role}\n{message.content}"
            for place, message in enumerate(request.messages)
        )
        place = len(request.messages)
        answer = f"\nassistant\n\0{request.session}\0{place}\0"
        answers[request.session, place] = answer.ljust(round(request.max_tokens * characters_per_token), "\0")
        yield prompt, prompt + answers[request.session, place]


def beginnings(text):
    return [text[:end] for end in range(1, len(text) + 1)]


@st.composite
def conversations(draw):
    """Requests of a few sessions with few different messages, so that prefixes are often shared."""
    piece = st.sampled_from(["a" * 15, "b" * 15, "a" * 7 + "c"])
    content = st.lists(piece, min_size=1, max_size=4).map("".join)
    conversations, requests = {}, []
    for number in range(draw(st.integers(1, 8))):
        session = draw(st.sampled_from("xyz"))
        after, before = conversations.get(session, (None, ()))
        messages = (*before, Message("user", draw(content)))
        requests.append(Request(number, session, 0.0, after, messages, draw(st.integers(1, 30)), False))
        conversations[session] = number, (*messages, Message("assistant", None))
    return requests


@settings(max_examples=80)
@given(conversations())
def test_returning_is_said_exactly_where_half_the_prompt_was_sent_or_answered_before(requests):
    seen = set()
    marked = mark_returning(requests, 2.0)
    for request, (prompt, sequence) in zip(marked, written_out(requests, 2.0), strict=True):
        assert request.returning is (sum(text in seen for text in beginnings(prompt)) >= len(prompt) / 2)
        seen.update(beginnings(sequence))


@settings(max_examples=80)
@given(conversations())
def test_the_working_set_is_every_prefix_that_two_requests_have_once(requests):
    uses = Counter(text for _, sequence in written_out(requests, 2.0) for text in beginnings(sequence))
    shared = sum(count > 1 for count in uses.values())
    assert working_set_tokens(Workload("any", tuple(requests), None, 2.0)) == round(shared / 2.0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_seeds_give_equal_workloads_and_others_other_texts(make, name):
    assert make(name) == make(name)
    assert make(name).requests[0].messages != make(name, seed=1).requests[0].messages


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_are_numbered_in_order_of_time_and_follow_earlier_ones(make, name):
    requests = make(name).requests
    assert [request.number for request in requests] == list(range(len(requests)))
    assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)
    assert all(request.after is None or request.after < request.number for request in requests)
    assert not requests[0].returning


@pytest.mark.parametrize("name", WORKLOADS)
def test_answers_stand_only_where_an_earlier_request_of_the_session_was_answered(make, name):
    requests = make(name).requests
    for request in requests:
        for place, message in enumerate(request.messages):
            if message.content is None:
                assert message.role == "assistant"
                answered = [r for r in requests[: request.number] if r.session == request.session]
                assert request.messages[:place] in [r.messages for r in answered]
        assert request.messages[-1].role == "user"


@pytest.mark.parametrize(("order", "sent"), [("tile", "012012012"), ("interleave", "012001122")])
def test_documents_are_repeated_in_the_order_that_was_asked_for(make, order, sent):
    workload = make("long-document-qa", order=order)
    assert "".join(request.session[-1] for request in workload.requests) == sent
    assert [request.returning for request in workload.requests] == [False] * 3 + [True] * 6
    assert [request.after for request in workload.requests][:3] == [None] * 3
    assert all(workload.requests[r.after].session == r.session for r in workload.requests[3:])
    assert workload.concurrency == 2


def test_random_order_repeats_every_document_as_often(make):
    sessions = [request.session for request in make("long-document-qa", repeats=5).requests]
    assert sorted(sessions) == sorted(sessions[:3] * 6)
    assert sessions[3:] != sessions[:3] * 5


def test_documents_working_set_is_the_documents(make):
    assert working_set_tokens(make("long-document-qa")) == pytest.approx(3 * 60, rel=0.1)


def test_users_come_one_by_one_and_ask_every_so_often(make):
    requests = make("multi-round-qa", qps=0.5).requests
    times = {user: [r.at_s for r in requests if r.session == user] for user in ("user 0", "user 1", "user 2")}
    assert times == {"user 0": [0, 6, 12], "user 1": [4, 10, 16], "user 2": [8, 14, 20]}
    for request in requests:
        earlier = [r.number for r in requests[: request.number] if r.session == request.session]
        assert request.after == (earlier[-1] if earlier else None)


def test_in_a_closed_loop_every_user_asks_at_once_and_nobody_twice_before_the_others(make):
    workload = make("multi-round-qa", concurrency=2)
    assert workload.concurrency == 2
    assert {request.at_s for request in workload.requests} == {0.0}
    users = [request.session for request in workload.requests]
    assert users == users[:3] * 3
    assert len(set(users)) == 3
    assert [request.after for request in workload.requests] == [None] * 3 + list(range(6))


def test_a_users_first_request_is_no_returning_one_though_the_system_prompt_is_shared(make):
    requests = make("multi-round-qa").requests
    assert [request.returning for request in requests] == [request.after is not None for request in requests]
    assert len({request.messages[0] for request in requests}) == 1


def test_a_conversation_is_sent_whole_with_places_for_its_answers(make):
    last = max(make("multi-round-qa").requests, key=lambda request: len(request.messages))
    assert [message.role for message in last.messages] == ["system", "user", *(["assistant", "user"] * 2)]
    assert len(last.messages[1].content.split()) == 80 + 20


def test_conversations_working_set_is_all_but_the_last_questions(make):
    # The system prompt once; per user the history and two questions of three, each with its answer.
    assert working_set_tokens(make("multi-round-qa")) == pytest.approx(10 + 3 * (80 + 2 * (20 + 7)), rel=0.1)


def test_groups_share_their_system_prompt_and_nothing_else(make):
    requests = make("shared-prefix-groups").requests
    heads = {}
    for request in requests:
        heads.setdefault(request.session.split(",")[0], set()).add(request.messages[0])
    assert all(len(head) == 1 for head in heads.values())
    assert len(set.union(*heads.values())) == len(heads) == 4
    seen = set()
    for request in requests:
        assert request.returning is (request.messages[0] in seen)
        seen.add(request.messages[0])


def test_a_staircase_sends_more_in_its_later_stages():
    rates, stage_s = (1, 10), 50.0
    workload = shared_prefix_groups(
        random.Random(0), WORD_TOKENS, groups=2, system_tokens=5, rates=rates, stage_s=stage_s
    )
    early = sum(request.at_s < stage_s for request in workload.requests)
    assert early < len(workload.requests) / 4
    assert workload.requests[-1].at_s < 2 * stage_s


def test_long_prompts_come_back_in_later_bursts_with_other_questions(make):
    requests = make("straggler-burst").requests
    assert {request.at_s for request in requests} == {0.0, 60.0}
    long = [request for request in requests if request.session == "long 1"]
    assert [request.returning for request in long] == [False, True]
    assert long[0].messages[0] == long[1].messages[0]
    assert long[0].messages[1] != long[1].messages[1]


def test_a_trace_keeps_its_times_lengths_and_shared_blocks(make):
    requests = make("conversation-trace", rate_scale=2.0).requests
    assert [request.at_s for request in requests] == [0, 0.5, 1.25, 1.25, 4.5, 4.75]
    assert [request.max_tokens for request in requests] == [3, 1, 1, 1, 3, 1]
    prompts = [request.messages[0].content.split() for request in requests]
    assert [len(prompt) for prompt in prompts] == [17, 14, 27, 17, 17, 9]
    assert prompts[2][:17] == prompts[0] == prompts[4]
    assert prompts[1][:8] == prompts[0][:8]
    assert prompts[1][8:] != prompts[0][8:14]
    assert prompts[3][:14] == prompts[1]
    assert [request.returning for request in requests] == [False, True, True, True, True, False]


def test_a_trace_that_is_not_there_or_too_short_is_named(trace, tmp_path):
    with pytest.raises(ValueError, match=r"there is no .*/absent\.jsonl; put"):
        conversation_trace(random.Random(0), WORD_TOKENS, trace=tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="has 6 requests, 7 were asked for"):
        conversation_trace(random.Random(0), WORD_TOKENS, trace=trace, requests=7)
    trace.write_text("no JSON\n")
    with pytest.raises(TraceError, match="line 1"):
        conversation_trace(random.Random(0), WORD_TOKENS, trace=trace)


@pytest.mark.parametrize("name", WORKLOADS)
def test_zero_and_negative_parameters_are_refused_by_name(make, name):
    numbers = [key for key, value in parameters(name).items() if type(value) in (int, float)]
    assert numbers
    for key in numbers:
        for value in (0, -1):
            with pytest.raises(ValueError, match=r"must be|more than") as refused:
                make(name, **{key: value})
            assert key in str(refused.value)
            assert str(refused.value).count(".") == 1


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_that_the_model_has_no_room_for_are_refused(make, name):
    with pytest.raises(ValueError, match=r"the model has room for 40: ask for .*smaller"):
        make(name, max_model_tokens=40)
    assert make(name, max_model_tokens=32_768) == make(name)


def test_an_unknown_order_and_empty_stages_are_refused():
    with pytest.raises(ValueError, match="order must be one of random, tile, interleave, got 'zigzag'"):
        long_document_qa(random.Random(0), WORD_TOKENS, document_tokens=5, order="zigzag")
    with pytest.raises(ValueError, match="no request falls into the stages"):
        shared_prefix_groups(random.Random(0), WORD_TOKENS, groups=1, rates=(1e-9,), stage_s=1.0)
    with pytest.raises(ValueError, match="stages"):
        shared_prefix_groups(random.Random(0), WORD_TOKENS, groups=1, rates=())
    with pytest.raises(ValueError, match="long_tokens must be more than"):
        straggler_burst(random.Random(0), WORD_TOKENS, system_tokens=20, long_tokens=20)
    with pytest.raises(ValueError, match="qps must be above zero, got nan"):
        multi_round_qa(random.Random(0), WORD_TOKENS, qps=float("nan"))


@settings(max_examples=50)
@given(tokens=st.integers(1, 400), seed=st.integers(0, 5))
def test_texts_have_as_many_tokens_as_asked_for(tokens, seed):
    assert len(WORD_TOKENS(random.Random(seed), tokens).split()) == tokens
    longest = max(map(len, WORDS))
    assert abs(len(LETTER_TOKENS(random.Random(seed), tokens)) - tokens) <= longest
    assert WORD_TOKENS(random.Random(seed), tokens) == WORD_TOKENS(random.Random(seed), tokens)


def test_scaled_parameters_are_lengths_only():
    own, tenth = parameters("multi-round-qa"), parameters("multi-round-qa", 0.1)
    assert (own["history_tokens"], tenth["history_tokens"]) == (20_000, 2_000)
    assert (own["users"], own["qps"]) == (tenth["users"], tenth["qps"])
    assert parameters("multi-round-qa", 1e-9)["question_tokens"] == 1
    with pytest.raises(ValueError, match="there is no workload 'chat'; choose one of long-document-qa"):
        parameters("chat")


@pytest.mark.parametrize("tokens", [150, 700, 3000])
@pytest.mark.parametrize("name", ["long-document-qa", "multi-round-qa", "straggler-burst", "rearranged-chunks"])
def test_a_working_set_is_reached_by_the_number_of_prefixes(name, tokens):
    workload = with_working_set(name, 0, WORD_TOKENS, tokens, **SMALL[name])
    assert working_set_tokens(workload) == pytest.approx(tokens, abs=80)


def test_documents_and_questions_have_lengths_of_their_own_where_a_shortest_is_given():
    sizes = {"document_tokens": 300, "shortest_document_tokens": 30, "question_tokens": 12}
    made = [
        long_document_qa(random.Random(7), WORD_TOKENS, documents=40, shortest_question_tokens=2, **sizes)
        for _ in range(2)
    ]
    assert made[0] == made[1]
    lengths = [[len(message.content.split()) for message in request.messages] for request in made[0].requests]
    first = [document for document, _ in lengths[:40]]
    assert min(first) >= 30
    assert max(first) <= 300
    assert len(set(first)) > 25
    assert {question for _, question in lengths} == set(range(2, 13))
    aligned = long_document_qa(random.Random(7), WORD_TOKENS, documents=4, document_tokens=64, question_tokens=8)
    assert {len(request.messages[0].content.split()) for request in aligned.requests} == {64}


@pytest.mark.parametrize(
    "wrong",
    [{"shortest_document_tokens": 0}, {"shortest_document_tokens": 21_000}, {"shortest_question_tokens": 21}],
)
def test_a_shortest_length_above_the_longest_or_below_one_is_refused(wrong: dict[str, int]):
    with pytest.raises(ValueError, match="at least"):
        long_document_qa(random.Random(0), WORD_TOKENS, **wrong)


def documents_of(request: Request) -> tuple[Message, ...]:
    return request.messages[1:-1]


def test_no_prompt_has_its_documents_in_an_order_that_another_has(make):
    requests = make("rearranged-chunks", documents=4, chunks=3, appearances=18).requests
    orders = [documents_of(request) for request in requests]
    assert len(set(orders)) == len(orders) == 24 == 4 * 3 * 2  # every order that there is
    assert all(len(set(order)) == 3 for order in orders)
    assert len({message for order in orders for message in order}) == 4
    assert len({request.messages[0] for request in requests}) == 1
    assert len({request.messages[-1] for request in requests}) == len(requests)


def test_chunks_have_lengths_of_their_own(make):
    requests = make("rearranged-chunks", documents=60).requests
    lengths = {len(message.content.split()) for request in requests for message in documents_of(request)}
    assert min(lengths) >= 30
    assert max(lengths) <= 60
    assert len(lengths) > 20
    assert {len(request.messages[-1].content.split()) for request in requests} == set(range(2, 7))


def test_a_prompt_of_known_chunks_returns_though_no_prompt_began_as_it_does(make):
    requests = make("rearranged-chunks").requests
    seen: set[Message] = set()
    for request in requests:
        texts = {message: len(message.content) for message in request.messages}
        known = sum(length for message, length in texts.items() if message in seen)
        assert request.returning is (known >= sum(texts.values()) / 2)
        seen.update(request.messages)
    by_prefix = mark_returning(requests, WORD_TOKENS.characters_per_token)
    assert sum(r.returning for r in by_prefix) < sum(r.returning for r in requests) / 2


def test_the_working_set_of_chunks_is_every_document_that_comes_twice_once(make):
    workload = make("rearranged-chunks")
    uses = Counter(message for request in workload.requests for message in request.messages)
    twice = sum(len(message.content.split()) for message, count in uses.items() if count > 1)
    assert working_set_tokens(workload) == pytest.approx(twice, rel=0.1)


def test_more_prompts_than_orders_are_refused(make):
    with pytest.raises(ValueError, match="3 documents have fewer orders than 7; ask for fewer appearances"):
        make("rearranged-chunks", documents=3, appearances=7)
    with pytest.raises(ValueError, match="documents must be at least 6"):
        rearranged_chunks(random.Random(0), WORD_TOKENS, documents=5)
