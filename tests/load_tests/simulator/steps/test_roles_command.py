"""`python -m load_tests.simulator roles`: its tables, its JSON, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from load_tests.simulator.__main__ import main
from load_tests.simulator.steps import command
from load_tests.simulator.steps.jobs import Load
from load_tests.simulator.steps.machines import MACHINES
from load_tests.simulator.steps.report import BEGIN, END, write_between
from load_tests.simulator.steps.roles import arms, run_arm


def run(*words):
    app = typer.Typer()
    app.command()(command.roles)
    return CliRunner().invoke(app, [*words, "--jobs", "40"])


def rows_of(*words):
    done = run("--json", "-", *words)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_every_way_to_share_out_the_replicas_is_an_arm():
    rows = rows_of("--machine", "gpu", "--replicas", "4")
    assert [(row["prefill"], row["decode"]) for row in rows] == [(0, 0), (0, 0), (1, 3), (2, 2), (3, 1)]
    assert all(row["jobs"] == 40 and 0 <= row["in_slo"] <= 1 for row in rows)


def test_equal_commands_give_equal_results_and_the_seed_matters():
    first, again, other = (
        rows_of("--machine", "cpu"),
        rows_of("--machine", "cpu"),
        rows_of("--machine", "cpu", "--seed", "5"),
    )
    assert first == again != other


def test_the_table_shows_both_machines_and_what_was_assumed():
    done = run()
    assert done.exit_code == 0
    assert [machine.name in done.stdout for machine in MACHINES.values()] == [True, True]
    assert "1 prefill + 1 decode" in done.stdout
    assert "Assumed, not measured" in done.stdout


def test_a_machine_that_is_not_there_is_refused():
    assert run("--machine", "tpu").exit_code == 2


def test_the_first_word_chooses_the_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["roles", "--machine", "cpu", "--jobs", "5"])
    assert ended.value.code == 0
    assert "1 prefill + 1 decode" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["--trace", "x"])
    assert ended.value.code == 2


def test_a_page_keeps_what_stands_around_its_tables(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    monkeypatch.setattr(command, "PAGE", page)
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert run("--machine", "cpu", "--write-docs").exit_code == 0
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n**Two replicas")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    page.write_text("no marks")
    assert run("--machine", "cpu", "--write-docs").exit_code == 1
    with pytest.raises(ValueError, match="has no lines"):
        write_between(page, "x")


def test_what_the_page_on_roles_says_of_two_cores_and_of_eight_gpus():
    def arm(name, number):
        machine = replace(MACHINES[name], jobs=600)
        load = Load(machine.rate, machine.prompt, machine.answer, machine.jobs)
        return run_arm(machine, arms(machine, 0)[number], load, seed=1)

    alike, shared = arm("cpu", 0), arm("cpu", 2)
    assert shared.ttft_p50_s > 1.4 * alike.ttft_p50_s
    assert shared.in_slo < alike.in_slo
    alike, target, six_two = arm("gpu", 0), arm("gpu", 1), arm("gpu", 7)
    assert (six_two.prefill, six_two.decode) == (6, 2)
    assert six_two.mean_completion_s < 0.8 * target.mean_completion_s < 0.8 * alike.mean_completion_s
