"""The replay of conversations: what a next turn is, what it finds, and what the command prints."""

import json
import random

import pytest
from typer.testing import CliRunner

from kvmanager.index.locations import Tier
from load_tests.simulator import next_turns
from load_tests.simulator.costs import Costs
from load_tests.simulator.one_replica.ranked_pool import RankedPool
from load_tests.simulator.trace import BLOCK_TOKENS, TraceRequest, block_key
from load_tests.simulator.turn_replay import TurnReplay, find_turns

COSTS = Costs(decode_s_per_token=0.01)


def request(at_s, *ids, tokens=None, output=0):
    return TraceRequest(at_s, tokens or len(ids) * BLOCK_TOKENS, output, ids)


def replay(trace, device_blocks=100, replicas=1, by_hotness=False):
    turns = find_turns(trace)
    arm = TurnReplay(replicas, device_blocks, COSTS, by_hotness)
    arm.run(turns)
    return turns, arm


def talk(number, blocks):
    """Ids of a conversation's first blocks; all begin with the same system prompt."""
    return (0, *range(1000 * number, 1000 * number + blocks - 1))


def test_a_next_turn_continues_all_of_an_earlier_prompt():
    first, second, other, third = find_turns(
        [
            request(0, *talk(1, 3)),
            request(1, *talk(1, 4)),
            request(2, *talk(2, 4)),
            request(3, *talk(1, 6)),
        ]
    )
    assert (first.previous, second.previous, other.previous, third.previous) == (None, first, None, second)


def test_a_system_prompt_alone_makes_no_next_turn_and_a_last_partial_block_does_not_count():
    turns = find_turns(
        [request(0, 0), request(1, *talk(1, 3), tokens=2 * BLOCK_TOKENS + 5), request(2, 0, 1000, 7777, 8888)]
    )
    assert [turn.previous for turn in turns] == [None, None, turns[1]]


def test_the_answer_is_what_the_next_turn_says_that_it_is():
    first, second, alone = find_turns(
        [
            request(0, *talk(1, 3), output=2 * BLOCK_TOKENS),
            request(60, *talk(1, 9)),
            request(90, *talk(2, 3), output=BLOCK_TOKENS),
        ]
    )
    assert first.left == second.hashes[:5]
    assert len(alone.left) == 4
    assert len(set(alone.left)) == 4


def test_a_next_turn_finds_its_kv_on_an_empty_device_and_not_on_one_that_others_have_filled():
    turns, _ = replay([request(0, *talk(1, 5)), request(60, *talk(1, 6))])
    assert (turns[1].known_blocks, turns[1].found_blocks) == (5, 5)
    crowd = [request(10 + n, *talk(100 + n, 30)) for n in range(8)]
    turns, _ = replay([request(0, *talk(1, 5)), *crowd, request(60, *talk(1, 6))])
    assert turns[-1].found_blocks == 1  # the system prompt
    assert turns[-1].loaded_blocks == 4
    assert turns[-1].ttft_s == pytest.approx(COSTS.load_s(Tier.CPU, 4 * BLOCK_TOKENS) + COSTS.prefill_s(BLOCK_TOKENS))


def test_of_a_prompt_that_is_asked_again_and_again_and_a_scan_hotness_keeps_the_prompt_and_recency_the_scan():
    asked = [request(n, *talk(1, 5)) for n in range(4)]
    scan = [request(10 + n, *talk(100 + n, 30)) for n in range(8)]
    kept = {}
    for by_hotness in (False, True):
        turns, _ = replay([*asked, *scan, request(60, *talk(1, 6))], by_hotness=by_hotness)
        kept[by_hotness] = turns[-1].found_blocks
    assert kept == {False: 1, True: 5}, "the system prompt, which the scan uses too, or all of it"


def chatter(conversations=40, turns=5, seed=0):
    """Conversations that come back about every 30 s, among prompts that never do: twice as many, and as long."""
    rng, trace = random.Random(seed), []
    for number in range(conversations):
        at, blocks = rng.uniform(0, 300), rng.randint(4, 8)
        for _ in range(turns):
            trace.append(request(round(at, 3), *talk(number + 1, blocks), output=100))
            at, blocks = at + rng.lognormvariate(3.4, 0.4), blocks + 1
    trace += [request(rng.uniform(0, 450), *talk(1000 + n, 8), output=100) for n in range(2 * conversations * turns)]
    return sorted(trace)


@pytest.mark.parametrize("by_hotness", [False, True])
def test_every_request_is_served_and_nothing_is_held_at_the_end(by_hotness):
    turns, arm = replay(chatter(10), 60, replicas=2, by_hotness=by_hotness)
    assert all(turn.ttft_s > 0 for turn in turns)
    for simulated in arm._replicas.values():
        assert simulated.pool.free == 60
        assert not simulated.waiting


def test_a_request_that_no_device_can_hold_is_refused_in_words():
    with pytest.raises(ValueError, match=r"request 1 needs 6 blocks, a device has 5"):
        replay([request(0, *talk(1, 5))], device_blocks=5)


def test_a_pool_evicts_by_rank_and_of_equals_what_was_freed_first():
    pool = RankedPool(3)
    blocks = [block_key(number) for number in range(5)]
    assert pool.hold([(blocks[0], 0.0), (blocks[1], 0.0), (blocks[2], 0.0)])
    assert not pool.hold([(blocks[3], 0.0)])
    pool.let_go(blocks[:3], 0.0)  # 2, then 1, then 0
    assert pool.hold([(blocks[3], 0.0)])
    assert [block in pool for block in blocks[:4]] == [True, True, False, True]
    pool.let_go([blocks[3]], 0.0)
    assert pool.hold([], unnamed=2)
    assert [block in pool for block in blocks[:4]] == [False, False, False, True]
    assert pool.leading_blocks([blocks[3], blocks[1]]) == 1


def test_a_block_that_was_used_again_goes_after_one_that_was_not():
    pool = RankedPool(2)
    again, once, new = (block_key(number) for number in range(3))
    for block in (again, once, again):
        pool.hold([(block, 0.0)])
        pool.let_go([block], 0.0)
    pool.hold([(new, 0.0)])
    assert (again in pool, once in pool) == (True, False)


def test_a_block_keeps_its_highest_score_while_it_is_there():
    pool = RankedPool(10)
    old, new = block_key(0), block_key(1)
    for score in (5.0, 0.0):
        pool.hold([(old, score)])
        pool.let_go([old], 0.0)
    pool.hold([(new, 0.0)])
    pool.let_go([new], 0.0)
    pool.hold([], unnamed=9)
    assert (old in pool, new in pool) == (True, False)


@pytest.fixture
def trace_file(tmp_path):
    lines = (
        {"timestamp": 1000 * r.timestamp_s, "input_length": r.input_tokens, "output_length": 9, "hash_ids": r.hash_ids}
        for r in chatter(6)
    )
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(*arguments):
    app = next_turns.typer.Typer()
    app.command()(next_turns.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_a_row_for_each_arm(trace_file, tmp_path):
    result = run("--trace", trace_file, "--replicas", 2, "--device-blocks", 60, "--json", tmp_path / "out.json")
    assert result.exit_code == 0
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["device_policy"] for row in rows] == ["lru", "hotness"]
    assert all(row["next_turns"] == 24 for row in rows)
    lines = result.stdout.strip().splitlines()
    assert len(lines) == 2 + len(rows)
    assert f"**{rows[0]['found_share']:.3f}**" in lines[2]


def test_the_commands_json_on_stdout_is_all_of_it(trace_file):
    result = run("--trace", trace_file, "--device-blocks", 60, "--requests", 10, "--json", "-")
    assert len(json.loads(result.stdout)) == len(next_turns.ARMS)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--trace", "nowhere.jsonl"], 2, "nowhere.jsonl cannot be read"),
        (["--trace", "TRACE", "--costs", "nowhere.json"], 2, "nowhere.json cannot be read"),
        (["--trace", "TRACE", "--device-blocks", "5"], 1, "give the devices more blocks."),
        (["--trace", "TRACE", "--device-blocks", "60", "--json", "no/such/folder"], 1, "cannot be written"),
        (["--trace", "TRACE", "--replicas", "0"], 2, "Invalid value for"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(trace_file, words, code, sentence):
    result = run(*(str(trace_file) if word == "TRACE" else word for word in words))
    assert result.exit_code == code
    assert sentence in " ".join(result.output.split())
