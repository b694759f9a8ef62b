"""`python -m load_tests.simulator`: what it prints and writes, and how it refuses what cannot work."""

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from load_tests.simulator.__main__ import simulate
from load_tests.simulator.trace import BLOCK_TOKENS

app = typer.Typer()
app.command()(simulate)

USERS_POLICIES = """
from kvmanager.index.eviction_policy import EvictionPolicy
from kvmanager.eviction.policies.lfu import DecayedLfu


class Mine(DecayedLfu):
    pass


class Seeded(DecayedLfu):
    def admits(self, newcomer, victim):
        return self.setting.seed == 7


class Broken(DecayedLfu):
    def victim(self):
        raise ZeroDivisionError("oh no")


class NoPolicy:
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a trace and a module of policies."""
    prompts = [[0, 1, 2], [0, 1, 3], [4], [5, 6], [0, 1, 2], [4]]
    lines = [
        {"timestamp": 1000 * second, "input_length": BLOCK_TOKENS * len(ids), "output_length": 9, "hash_ids": ids}
        for second, ids in enumerate(prompts)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "users_policies.py").write_text(USERS_POLICIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("users_policies", None)


def command(*options, **replaced):
    given = {"--trace": "trace.jsonl", "--capacity": "3", "--jobs": "1", **replaced}
    return CliRunner().invoke(app, [*(word for pair in given.items() for word in pair), *options])


def results(*options, **replaced):
    done = command("--json", "-", *options, **replaced)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


class TestResults:
    def test_json_on_stdout_is_all_that_is_on_stdout(self, folder):
        (row,) = results()
        assert (row["policy"], row["capacity_blocks"], row["requests"], row["blocks"]) == ("lfu", 3, 6, 13)
        assert row["hit_rate"] == row["hit_blocks"] / 13 > 0

    def test_the_fields_of_a_result(self, folder):
        (row,) = results("--device-blocks", "2", "--redis-blocks", "4", "--seed", "7")
        assert list(row) == [
            "policy",
            "capacity_blocks",
            "device_blocks",
            "redis_blocks",
            "replicas",
            "router",
            "rate_scale",
            "seed",
            "trace",
            "requests",
            "blocks",
            "hit_blocks",
            "hit_rate",
            "hit_rate_by_tier",
            "evicted_blocks",
            "tokens",
            "bytes_moved",
            "ttft_s",
            "load",
            "costs",
            "seconds",
        ]
        assert (row["device_blocks"], row["redis_blocks"], row["seed"], row["trace"]) == (2, 4, 7, "trace.jsonl")
        assert sum(row["hit_rate_by_tier"].values()) == pytest.approx(row["hit_rate"])
        tokens = row["tokens"]
        assert tokens["device"] + tokens["cpu"] + tokens["redis"] + tokens["recomputed"] == tokens["input"]
        assert tokens["input"] == 13 * BLOCK_TOKENS
        assert set(row["ttft_s"]) == {"mean", "p50", "p90", "p99"}

    def test_each_policy_at_each_capacity_in_the_order_given(self, folder):
        rows = results(**{"--capacity": "9,2", "--policy": "users_policies:Mine,lfu,lfu"})
        assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
            ("users_policies:Mine", 9),
            ("users_policies:Mine", 2),
            ("lfu", 9),
            ("lfu", 2),
        ]
        assert rows[0]["hit_rate"] == rows[2]["hit_rate"] > rows[3]["hit_rate"]

    def test_a_file_gets_what_stdout_would_and_stdout_the_table(self, folder):
        done = command("--json", "out.json", **{"--capacity": "2,3"})
        assert done.exit_code == 0
        rows = json.loads((folder / "out.json").read_text())
        assert [row["capacity_blocks"] for row in rows] == [2, 3]
        for row in rows:
            assert f"{row['hit_rate']:.3f}" in done.stdout
        assert "trace.jsonl: 6 requests, 13 blocks of 512 tokens" in done.stdout
        assert "TTFT" in done.stdout

    def test_a_progress_bar_is_for_terminals_only(self, folder):
        assert command().stderr == ""

    def test_equal_commands_give_equal_results_on_one_process_and_on_two(self, folder):
        options = {"--capacity": "2,3", "--policy": "lfu,users_policies:Mine"}
        first, second, parallel = results(**options), results(**options), results(**options, **{"--jobs": "2"})
        for row in (*first, *second, *parallel):
            assert row.pop("seconds") >= 0
        assert first == second == parallel

    def test_the_seed_reaches_the_policy(self, folder):
        options = {"--policy": "users_policies:Seeded", "--capacity": "2"}
        (default,), (seven,) = results(**options), results("--seed", "7", **options)
        assert default["evicted_blocks"] == 0 < seven["evicted_blocks"]

    def test_only_so_many_requests_are_replayed_as_are_wanted(self, folder):
        (row,) = results("--requests", "2")
        assert (row["requests"], row["blocks"], row["hit_blocks"]) == (2, 6, 2)

    def test_costs_of_a_file_are_used_and_named(self, folder):
        (folder / "costs.json").write_text('{"prefill_tokens_per_s": 512, "model": "mine"}')
        (row,) = results("--costs", "costs.json", "--requests", "1")
        assert row["costs"]["model"] == "mine"
        assert row["ttft_s"]["mean"] == pytest.approx(3)

    @pytest.mark.parametrize("ending", ["png", "svg"])
    def test_a_plot_is_written(self, folder, ending):
        file = folder / f"plot.{ending}"
        done = command("--plot", str(file), **{"--capacity": "2,3", "--policy": "lfu,users_policies:Mine"})
        assert done.exit_code == 0, done.stderr
        assert file.read_bytes().startswith(b"\x89PNG" if ending == "png" else b"<?xml")

    def test_replicas_share_a_trace_behind_each_router(self, folder):
        options = ("--replicas", "2", "--router", "round-robin,ours", "--device-blocks", "5")
        rows = results(*options)
        assert [row["router"] for row in rows] == ["round-robin", "ours"]
        for row in rows:
            assert len(row["load"]["tokens"]) == row["replicas"] == 2
            assert sum(row["load"]["tokens"]) == row["tokens"]["recomputed"]
        assert "ours" in command(*options).stdout

    def test_several_replicas_have_a_router_though_none_is_named(self, folder):
        (row,) = results("--replicas", "2", "--device-blocks", "5")
        assert row["router"] == "ours"


REFUSED = [
    ({"--trace": "none.jsonl"}, "none.jsonl cannot be read (No such file or directory)."),
    ({"--trace": "users_policies.py"}, "users_policies.py, line 2: not a JSON object."),
    ({"--capacity": "0"}, "--capacity must be a whole number from 1 to 1000000000000, got '0'."),
    ({"--capacity": "-5"}, "--capacity must be"),
    ({"--capacity": "10,many"}, "--capacity must be a whole number from 1 to 1000000000000, got 'many'."),
    ({"--capacity": ""}, "--capacity must be"),
    ({"--capacity": "1e3"}, "--capacity must be"),
    ({"--capacity": "9" * 30}, "--capacity must be"),
    ({"--policy": "best"}, "--policy: unknown policy 'best'; choose lfu, "),
    ({"--policy": "lfu,,lfu"}, "--policy must be names separated by commas, got 'lfu,,lfu'."),
    ({"--policy": "users_policies:NoPolicy"}, "'users_policies:NoPolicy' is no subclass of"),
    ({"--policy": "users_policies:Missing"}, "'users_policies:Missing' cannot be imported"),
    ({"--policy": "no_such_module:Mine"}, "'no_such_module:Mine' cannot be imported"),
    ({"--policy": "json:loads"}, "'json:loads' is no subclass of"),
    ({"--replicas": "0"}, "--replicas must be a whole number from 1"),
    ({"--replicas": "2"}, "--device-blocks must say how many blocks each replica's pool has"),
    ({"--replicas": "2", "--device-blocks": "3"}, "--device-blocks must be at least 4: a request of trace.jsonl needs"),
    ({"--replicas": "2", "--device-blocks": "9", "--router": "best"}, "--router: unknown router 'best'; choose "),
    ({"--replicas": "2", "--device-blocks": "9", "--rate-scale": "0"}, "--rate-scale must be a number above 0"),
    (
        {"--replicas": "2", "--device-blocks": "9", "--policy": "belady"},
        "--policy belady knows the future of one replica",
    ),
    ({"--rate-scale": "2"}, "--rate-scale needs a router"),
    ({"--device-blocks": "-1"}, "--device-blocks must be a whole number from 0"),
    ({"--redis-blocks": "x"}, "--redis-blocks must be a whole number from 0"),
    ({"--requests": "0"}, "--requests must be a whole number from 1"),
    ({"--seed": "x"}, "--seed must be a whole number from 0"),
    ({"--jobs": "0"}, "--jobs must be a whole number from 1"),
    ({"--costs": "none.json"}, "none.json cannot be read (No such file or directory)."),
    ({"--costs": "trace.jsonl"}, "trace.jsonl is not JSON."),
    ({"--json": "no/such/folder.json"}, "--json: no/such/folder.json cannot be written (there is no folder no/such)."),
    ({"--json": "."}, "--json: . cannot be written (it is a folder)."),
    ({"--json": "trace.jsonl"}, "--json: trace.jsonl cannot be written (it is an input)."),
    ({"--plot": "no/such/folder.png"}, "--plot: no/such/folder.png cannot be written (there is no folder no/such)."),
    ({"--plot": "plot.doc"}, "--plot: plot.doc must end in .png, .svg or .pdf."),
    ({"--plot": "plot"}, "--plot: plot must end in .png, .svg or .pdf."),
]


class TestRefusals:
    @pytest.mark.parametrize(("options", "complaint"), REFUSED, ids=lambda part: str(part)[:60])
    def test_what_cannot_work_is_refused_in_one_sentence_and_nothing_is_written(self, folder, options, complaint):
        before = sorted(Path.cwd().iterdir())
        done = command(**{"--json": "out.json", "--plot": "out.png", **options})
        assert done.exit_code == 2
        assert complaint in done.stderr
        assert done.stderr.count("\n") == 1
        assert done.stderr.endswith(".\n")
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        assert [path for path in sorted(Path.cwd().iterdir()) if path.name != "__pycache__"] == before

    def test_a_policy_that_fails_is_named_with_the_line_that_failed(self, folder):
        done = command("--json", "out.json", **{"--policy": "users_policies:Broken"})
        assert done.exit_code == 1
        assert "The replay of users_policies:Broken broke off (ZeroDivisionError: oh no" in done.stderr
        assert "users_policies.py, line 17" in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (folder / "out.json").exists()
