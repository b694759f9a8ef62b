"""The replay of device orders: what a mix is, what is counted, and that each order keeps what its name says."""

import json

import pytest
from typer.testing import CliRunner

from kvmanager.eviction.device_ranks import score_of_rest
from load_tests.device_order import __main__ as command
from load_tests.device_order.devices import ClairvoyantDevice, PoolDevice
from load_tests.device_order.mixes import MIXES, blocks_of, mix
from load_tests.device_order.replay import Uses, replay
from load_tests.simulator.one_replica.ranked_pool import RankedPool
from load_tests.simulator.trace import BLOCK_TOKENS, TraceRequest
from load_tests.simulator.turn_replay import find_turns


def request(at_s, *ids, output=0):
    return TraceRequest(at_s, len(ids) * BLOCK_TOKENS, output, ids)


def scanned(asked=4, scans=40, blocks=5):
    """A prompt that is asked again and again, a scan of others, and the prompt once more."""
    prompt = tuple(range(blocks))
    trace = [request(n, *prompt) for n in range(asked)]
    trace += [request(10 + n, *range(100 * (n + 1), 100 * (n + 1) + 8)) for n in range(scans)]
    return find_turns([*trace, request(1000, *prompt)])


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_is_the_same_for_a_seed_and_another_for_another(name):
    assert mix(name, 1) == mix(name, 1)
    assert mix(name, 1) != mix(name, 2)
    assert [one.timestamp_s for one in mix(name, 1)] == sorted(one.timestamp_s for one in mix(name, 1))


def test_a_mix_has_its_parts_and_no_other():
    turns = {name: find_turns(mix(name, 3)) for name in ("chat", "docs+scan")}
    assert any(turn.previous is not None for turn in turns["chat"])
    assert not any(turn.left[turn.prompt_blocks :] for turn in turns["docs+scan"]), "only conversations are answered"


def test_the_plan_counts_a_use_for_what_is_known_and_for_nothing_behind_it():
    uses = Uses(half_life_requests=1.0)
    first, second = find_turns([request(0, 1, 2, 3), request(1, 1, 2, 9, 3)])
    assert uses.plan(first).scores == []
    plan = uses.plan(second)
    assert [end for end, _ in plan.scores] == [2]
    assert plan.scores[0][1] > plan.now


def test_after_a_scan_hotness_has_the_prompt_and_recency_has_not():
    turns = scanned()
    hits = {policy: replay(turns, PoolDevice(40, policy)).hit_share for policy in ("lru", "hotness")}
    blocks = sum(turn.prompt_blocks for turn in turns)
    assert hits["lru"] == pytest.approx(3 * 5 / blocks)
    assert hits["hotness"] == pytest.approx(4 * 5 / blocks)


def test_a_next_turn_is_found_when_all_that_the_turn_before_left_is_there():
    turns = find_turns([request(0, 1, 2, 3, output=BLOCK_TOKENS), request(1, 1, 2, 3, 4, 5)])
    assert replay(turns, PoolDevice(20, "lru")).next_turn_share == 1.0
    others = [request(0.5 + n / 100, *range(100 * n + 50, 100 * n + 58)) for n in range(1, 9)]
    turns = find_turns(sorted([request(0, 1, 2, 3, output=BLOCK_TOKENS), *others, request(1, 1, 2, 3, 4, 5)]))
    assert replay(turns, PoolDevice(20, "lru"), running=1).next_turn_share == 0.0


@pytest.mark.parametrize("name", MIXES)
def test_no_order_finds_more_than_the_one_that_knows_the_future(name):
    made = mix(name, 4)
    turns = find_turns(made[:300])
    blocks = max(blocks_of(made) // 20, 1 + max(len(turn.left) for turn in turns))
    best = replay(turns, ClairvoyantDevice(blocks, turns), running=1).hit_share
    for policy in ("lru", "hotness"):
        assert replay(turns, PoolDevice(blocks, policy), running=1).hit_share <= best


@pytest.mark.parametrize("policy", ["lru", "hotness"])
def test_nothing_is_held_when_all_requests_have_ended(policy):
    device = PoolDevice(300, policy)
    replay(find_turns(mix("chat+scan", 1)[:200]), device)
    assert device.pool.get_num_free_blocks() == 300


def test_a_request_that_no_device_can_hold_is_refused_in_words():
    turns = find_turns([request(0, *range(9))])
    for device in (PoolDevice(8, "lru"), ClairvoyantDevice(8, turns)):
        with pytest.raises(ValueError, match="request 1 needs 9 blocks: give the device more"):
            replay(turns, device)


def run(*arguments):
    app = command.typer.Typer()
    app.command()(command.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_has_a_row_for_each_size_of_a_trace(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": n, "input_length": 1024, "output_length": 9, "hash_ids": [1, n + 2]})
            for n in range(6)
        )
    )
    result = run("--trace", trace, "--seeds", 0, "--json", tmp_path / "out.json")
    assert result.exit_code == 0
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["blocks"] for row in rows] == list(command.TRACE_BLOCKS)
    assert set(rows[0]["found"]) == set(command.ARMS)
    assert "| 500 | 0.417, 0.000 |" in result.stdout, "5 of 12 blocks: the shared one, but the first time"


def test_a_trace_that_cannot_be_read_is_said_in_one_sentence():
    result = run("--trace", "nowhere.jsonl", "--seeds", 0)
    assert result.exit_code == 2
    assert "nowhere.jsonl cannot be read" in " ".join(result.output.split())


@pytest.mark.parametrize("name", MIXES)
def test_the_simulators_pool_finds_what_the_queue_that_serves_finds(name):
    """Request by request, each with the same scores."""
    turns, uses = find_turns(mix(name, 5)[:400]), Uses()
    blocks = 10 * (max(len(turn.left) for turn in turns) // 2)  # their shares are whole, one block more or not
    real, simulated = PoolDevice(blocks, "hotness"), RankedPool(blocks)
    for turn in turns:
        use = uses.plan(turn)
        found = real.found(turn)
        assert found == simulated.leading_blocks(turn.hashes[: turn.prompt_blocks]), turn.number
        real.begin(turn, use)
        known = [score for begin, end, score in spans_of(use.scores) for _ in range(begin, end)]
        rest = score_of_rest(use.scores, len(turn.left), use.now)
        scores = known + [rest] * (len(turn.left) - len(known))
        simulated.hold(list(zip(turn.left, scores, strict=True)))
        real.end(turn)
        simulated.let_go(turn.left, use.now)


def spans_of(scores):
    """`(begin, end, score)` of consecutive spans."""
    return [(begin, end, score) for (begin, _), (end, score) in zip([(0, 0.0), *scores], scores, strict=False)]
