"""`python -m load_tests.simulator.lengths`: the shares of pairs, on made-up requests and on the conversation trace."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import typer
from typer.testing import CliRunner

from load_tests.simulator import lengths
from load_tests.simulator.costs import Costs
from load_tests.simulator.trace import TraceRequest, read_trace

ROOT = Path(__file__).parents[3]
NAME = "conversation_trace.jsonl"
FILES = [folder / "shared" / "data" / NAME for folder in (ROOT, ROOT.parent)]


def conversations(seed: int) -> list[TraceRequest]:
    """Prompts that share a first block; each of 40 conversations has answers of a length of its own."""
    rng, found = Random(seed), []
    for number in range(1200):
        which = rng.randrange(40)
        tokens = 4 * 2 ** (which % 8)
        found.append(TraceRequest(10.0 * number, 512 * 3, tokens, (0, 1 + 2 * which, 2 + 2 * which)))
    return found


def test_of_conversations_whose_answers_differ_all_pairs_are_soon_ranked_rightly():
    everybody, known = lengths.replay(conversations(1), Costs(), 9999)["rows"]
    assert known["share"] > 0.9
    assert known["ranked_rightly"] > 0.95 > everybody["ranked_by_prompt_length"]
    assert known["log2_error"] < 0.5


def test_what_has_not_ended_is_not_learned_from():
    trace = [request._replace(timestamp_s=0.0) for request in conversations(1)]
    everybody, known = lengths.replay(trace, Costs(), 9999)["rows"]
    assert known["share"] == 0
    assert everybody["ranked_rightly"] == known["ranked_rightly"] == 0.5


def test_the_command_writes_a_table_and_json_and_names_a_file_that_is_not_there(tmp_path: Path):
    line = '{"timestamp": 1, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}\n'
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text(2 * line)
    done = CliRunner().invoke(_app(), ["--trace", str(trace), "--json", str(out)])
    assert done.exit_code == 0
    assert "pairs ranked rightly" in done.stdout
    assert json.loads(out.read_text())["requests"] == 2
    assert CliRunner().invoke(_app(), ["--trace", str(tmp_path / "none")]).exit_code == lengths.EXIT_INPUT


def test_on_the_conversation_trace_three_of_five_pairs_are_ranked_rightly_and_seven_of_ten_with_history():
    file = next((file for file in FILES if file.exists()), None)
    if file is None:
        pytest.skip(f"{NAME} is in no shared/data folder in or beside the repository")
    everybody, known = lengths.replay(read_trace(file), Costs(), 2**16)["rows"]
    assert everybody["ranked_rightly"] >= 0.60
    assert known["ranked_rightly"] >= 0.70
    assert everybody["ranked_by_prompt_length"] < 0.55


def _app():
    app = typer.Typer()
    app.command()(lengths.main)
    return app
