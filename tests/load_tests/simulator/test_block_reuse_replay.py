"""The replay by the block: what a prompt shares with those before it, and what an index of whole segments loses."""

import json
import random

import pytest
from typer.testing import CliRunner

from load_tests.simulator import block_reuse
from load_tests.simulator.block_reuse import HashedRequest, ask_questions, by_block, by_segment, name_blocks
from load_tests.simulator.trace import TraceRequest


def test_a_next_turn_begins_with_the_prompt_before_it_and_its_answer_to_the_block():
    first = TraceRequest(0.0, 1030, 100, (1, 2, 3))
    second = TraceRequest(1.0, 1500, 20, (1, 2, 4))
    (hashes, prompt_blocks), (later, _) = name_blocks([first, second], 16)
    assert (len(hashes), prompt_blocks) == (1130 // 16, 1030 // 16)
    assert later[: len(hashes)] == hashes
    assert len(set(later)) == len(later) == 1520 // 16


def test_other_prompts_share_the_blocks_of_the_trace_and_no_token_more():
    """One common block is what a system prompt shares with everybody: that makes no next turn."""
    (one, _), (other, _) = name_blocks([TraceRequest(0.0, 900, 0, (1, 2)), TraceRequest(1.0, 900, 0, (1, 3))], 16)
    assert one[:32] == other[:32]
    assert not set(one[32:]) & set(other[32:])


def test_a_prompt_that_leaves_a_segment_inside_finds_its_beginning_by_the_block_alone():
    requests = [HashedRequest([bytes([n]) * 32 for n in range(10)], 10)]
    requests += [HashedRequest([*requests[0].hashes[:7], b"a" * 32, b"b" * 32], 9)]
    assert by_segment(requests, 4) == (4 / 19, 10 + 5)
    assert by_block(requests, 4) == (7 / 19, 10 + 2)


@pytest.mark.parametrize("seed", range(20))
def test_by_the_block_all_leading_blocks_ever_seen_are_found_and_stored_once(seed):
    rng = random.Random(seed)
    names = {}  # a number names a block and all before it
    paths = [[rng.randrange(2) for _ in range(rng.randint(1, 4))] for _ in range(30)]
    ids = [tuple(names.setdefault(str(path[: n + 1]), len(names)) for n in range(len(path))) for path in paths]
    trace = [TraceRequest(at, len(i) * 512 - rng.randrange(511), rng.randrange(200), i) for at, i in enumerate(ids)]
    requests, seen, hits = name_blocks(trace, 64), set(), 0
    for hashes, prompt_blocks in requests:
        prompt = hashes[:prompt_blocks]
        hits += next((n for n, block in enumerate(prompt) if block not in seen), prompt_blocks)
        seen |= set(hashes)
    total = sum(prompt_blocks for _, prompt_blocks in requests)
    found = by_block(requests, 4)
    assert found == (hits / total, len(seen))
    whole = by_segment(requests, 4)
    assert whole.hit_rate <= found.hit_rate
    assert whole.stored_blocks >= found.stored_blocks


def test_questions_about_one_document_are_stored_without_a_second_copy_of_it():
    requests = ask_questions(20, 1000, 16, random.Random(0))
    different = {block for request in requests for block in request.hashes}
    assert {tuple(request.hashes[:62]) for request in requests} == {tuple(requests[0].hashes[:62])}
    assert by_block(requests, 16).stored_blocks == len(different)
    assert by_segment(requests, 16).stored_blocks == len(different) + 19 * (62 - 48)  # of the document's last segment


def test_the_command_prints_both_and_refuses_what_it_cannot_replay(tmp_path):
    lines = [{"timestamp": 0, "input_length": 700, "output_length": 90, "hash_ids": [1, 2]}] * 2
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    app = block_reuse.typer.Typer()
    app.command()(block_reuse.main)

    def call(*words, replayed=("--trace", str(trace))):
        return CliRunner().invoke(app, [*replayed, *words])

    for done in call(), call(replayed=("--questions", "20")):
        assert done.exit_code == 0
        heads = [line.split("|")[1].strip() for line in done.output.splitlines()[2:]]
        assert heads == ["by the segment", "by the block", "different blocks"]
    assert [call(replayed=()).exit_code, call("--questions", "20").exit_code] == [2, 2]
    assert [call(*words).exit_code for words in (["--block-tokens", "17"], ["--segment-tokens", "100"])] == [2, 2]
    trace.write_text("{}")
    assert call().exit_code == 2
