"""The benchmark without servers: what is started and sent, what a command line means, going on after a stop."""

import contextlib
import json
import random
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import typer
import yaml

from load_tests.bench import __main__ as program
from load_tests.bench import measure as measuring
from load_tests.bench.arms import ARMS, BASE, BLENDED, EXACT, crosskv_settings
from load_tests.bench.cases import Case, parameters_of
from load_tests.bench.choice import FULL, QUICK, Choice, default_dtype
from load_tests.bench.figures import figures
from load_tests.bench.plan import Key, Sizes
from load_tests.harness.client import Measured, ServerError
from load_tests.measuring.journal import Journal
from load_tests.measuring.program import InputError
from load_tests.peers.engine import Peer
from load_tests.workloads import WORKLOADS, Words, long_document_qa, working_set_tokens

pytestmark = pytest.mark.usefixtures("each_processor")

WORDS = Words(lambda text: len(text.split()))
ANSWERS = [Measured(number, number > 0, 0.0, 1.0, 0.1, 2.0, 100, 10, 0, None, None) for number in range(2)]


# Arms


@pytest.mark.parametrize("name", ["plain", BASE, "offloading", "lmcache"])
def test_peers_are_started_with_the_shared_sizes(name, tmp_path):
    words = ARMS[name].command(Peer("m", 8001, 3, 77, 999, "float32"), tmp_path, 8002)
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--dtype"] == "float32"
    assert options["--device-blocks"] == "77"
    assert options["--replicas"] == "3"
    assert options["--max-model-len"] == "999"
    assert (options["--port"], options["--metrics-port"]) == ("8001", "8002")


@pytest.mark.parametrize("name", [EXACT, "crosskv-compressed", BLENDED])
def test_crosskv_is_started_with_the_shared_sizes_and_valid_settings(name, tmp_path):
    from configs.settings import load_settings

    words = ARMS[name].command(Peer("models/demo", 8001, 3, 77, 999, "float32"), tmp_path, 8002)
    assert words[-2:] == ["--port", "8001"]
    settings = load_settings(yaml.safe_load((tmp_path / "serve_config.yaml").read_text())["applications"][0]["args"])
    assert (settings.replicas, settings.device_blocks, settings.max_model_len) == (3, 77, 999)
    assert settings.dtype == "float32"
    assert settings.kv.redis_folder == str(tmp_path / "redis")
    assert settings.kv.fidelity == ("tolerant" if name == "crosskv-compressed" else "exact")
    blending = (settings.blending.separators, settings.blending.fill)
    assert blending == ((["<|im_start|>"], "first") if name == BLENDED else (None, "idle"))


def test_the_compressed_arm_keeps_as_much_as_the_pools_in_the_cpu_tier(tmp_path, each_processor):
    per_value = {"float32": 4, "bfloat16": 2}[each_processor]
    peer = Peer("models/demo", 8001, 2, 64, 999)
    exact, compressed = (crosskv_settings(peer, tmp_path, kind)["kv"] for kind in ("exact", "compressed"))
    assert "cpu_tier_bytes" not in exact
    assert compressed["cpu_tier_bytes"] == 2 * 64 * 6 * 2 * 2 * 64 * per_value * peer.settings().block_size_tokens


def test_arms_that_this_machine_cannot_run_say_why(monkeypatch):
    assert "refuses the CPU backend" in ARMS["offloading"].unfit()
    assert "CPU backend" in ARMS["lmcache"].unfit()
    assert ARMS["plain"].unfit() is None
    monkeypatch.setattr("configs.machine.accelerator", lambda: "cuda")
    assert ARMS["offloading"].unfit() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install lmcache" in ARMS["lmcache"].unfit()
    monkeypatch.setattr("load_tests.bench.arms.missing_packages", lambda: ["pandas", "pyarrow"])
    assert "needs pandas and pyarrow" in ARMS[BASE].unfit()


# Workloads


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name != "conversation-trace"])
def test_a_workload_fits_the_model_and_comes_back_as_often_as_its_size_says(name):
    sizes = Sizes(device_blocks=64)
    chosen = parameters_of(name, sizes, 1.5, rate=1.0)
    made = WORKLOADS[name](random.Random(0), WORDS, **chosen)
    wanted = 1.5 * sizes.replicas * sizes.pool_tokens
    assert 0.6 * wanted < working_set_tokens(made) < 1.8 * wanted
    assert sum(request.returning for request in made.requests) >= 0.5 * len(made.requests)


@pytest.mark.parametrize("device_blocks", [32, 128])
def test_documents_have_random_lengths_that_a_pool_has_room_for_unless_aligned_ones_are_asked_for(device_blocks):
    sizes = Sizes(device_blocks=device_blocks)
    made = {
        lengths: parameters_of("long-document-qa", replace(sizes, lengths=lengths), 1.5, rate=1.0)
        for lengths in ("random", "aligned")
    }
    drawn = made["random"]
    assert drawn["shortest_document_tokens"] == 300
    assert (drawn["shortest_question_tokens"], drawn["question_tokens"]) == (10, 120)
    assert 300 < drawn["document_tokens"] <= min(3_000, sizes.pool_tokens - 120 - 16)
    assert "shortest_document_tokens" not in made["aligned"]
    assert made["aligned"]["document_tokens"] == sizes.pool_tokens // 4
    assert sizes.digest() != replace(sizes, lengths="aligned").digest()


def test_prompts_of_chunks_fit_a_pool_and_bring_lengths_around_512_where_it_has_room():
    large, small = (parameters_of("rearranged-chunks", Sizes(device_blocks=blocks), 1.5, 1.0) for blocks in (128, 32))
    assert (large["shortest_document_tokens"], large["document_tokens"], large["chunks"]) == (424, 600, 6)
    assert small["chunks"] == 6
    assert small["document_tokens"] < 200
    for chosen in (large, small):
        rearranged = WORKLOADS["rearranged-chunks"](random.Random(0), WORDS, **chosen)  # refuses what has no room
        assert len(rearranged.requests) == -(-chosen["documents"] * chosen["appearances"] // 6)


def test_requests_ask_for_blended_kv_in_the_blended_arm_only(monkeypatch):
    sent = {}

    async def run_workload(url, model, workload, on_done, *, extra_body):
        sent[model] = dict(extra_body)
        return []

    monkeypatch.setattr(measuring, "run_workload", run_workload)
    server = measuring.ServerProcess("http://nowhere", psutil.Process(), Path("log"))
    for name in (BASE, EXACT, BLENDED):
        measuring._send(server, name, long_document_qa(random.Random(0), WORDS), ARMS[name].body, None)
    assert sent == {BASE: {}, EXACT: {}, BLENDED: {"kv_cache": {"fidelity": "blended"}}}


def test_each_arm_is_measured_on_the_workloads_that_are_for_it():
    plan = choose(arms=f"{EXACT},crosskv-compressed,{BLENDED}", workloads="rearranged-chunks,multi-round-qa").plan
    keys = plan.keys()
    assert {(key.arm, key.workload) for key in keys} == {
        (EXACT, "rearranged-chunks"),
        (EXACT, "multi-round-qa"),
        ("crosskv-compressed", "multi-round-qa"),
        (BLENDED, "rearranged-chunks"),
    }


def test_a_hit_rate_is_of_the_chunks_that_one_workload_asked_for(monkeypatch):
    text = "# TYPE crosskv_chunk_tokens counter\n" + "".join(
        f'crosskv_chunk_tokens_total{{outcome="{outcome}"}} {value}\n'
        for outcome, value in (("asked", 50), ("found", 9))
    )
    page = {"text": text}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=page["text"]))
    monkeypatch.setattr(measuring, "local_http", lambda: httpx.Client(transport=transport))
    before = measuring.chunk_tokens("http://fake")
    assert before == {"asked": 50, "found": 9}
    assert measuring.hit_rate(before, before) is None
    assert measuring.hit_rate(before, {"asked": 150, "found": 99}) == 0.9
    page["text"] = "# nothing\n"
    assert measuring.chunk_tokens("http://fake") == {}


# The command line


def choose(quick=False, device_blocks=None, seed=0, **said):
    default = QUICK if quick else FULL
    words = dict.fromkeys(("models", "arms", "workloads", "working_sets", "alternations"))
    sizes = Sizes(2, device_blocks or default.device_blocks, default_dtype(), None, seed)
    return Choice.made(default, sizes, **(words | said))


def test_lists_have_commas_between_their_words():
    plan = choose(models="10m, 40m", working_sets="0.5,3", arms=f"plain,{EXACT}").plan
    assert (plan.models, plan.working_sets, plan.arms) == (("10m", "40m"), (0.5, 3.0), ("plain", EXACT))


def test_quick_is_smaller_in_every_respect():
    quick, full = choose(quick=True), choose()
    assert (quick.name, full.name) == ("quick", "bench")
    assert len(quick.plan.keys()) < len(full.plan.keys())
    assert quick.plan.sizes.device_blocks < full.plan.sizes.device_blocks
    assert full.plan.alternations >= 3


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"models": "70b"}, "There is no model '70b'; choose from 10m, "),
        ({"arms": "sglang"}, "There is no arm 'sglang'"),
        ({"workloads": "qa"}, "There is no workload 'qa'"),
        ({"workloads": ","}, "No workload is named"),
        ({"working_sets": "big"}, "'big' are not numbers"),
        ({"working_sets": "0,1"}, "must be above zero"),
        ({"arms": "lmcache"}, "No arm is left"),
        ({"arms": BLENDED, "workloads": "multi-round-qa"}, "is measured on none of multi-round-qa"),
    ],
)
def test_what_cannot_be_is_one_sentence(said, sentence):
    with pytest.raises(InputError) as refused:
        choose(**said)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


# What is kept


def test_a_share_of_chunk_tokens_wants_both_counts():
    before, after = {"asked": 10.0, "found": 4.0}, {"asked": 30.0, "found": 14.0}
    assert measuring.hit_rate(before, after) == 0.5
    assert measuring.hit_rate(before, before) is None
    for one, other in (({}, after), (before, {}), ({"asked": 10.0}, after), (before, {"found": 14.0})):
        assert measuring.hit_rate(one, other) is None, "a server that did not answer, or has no such count"


def test_other_sizes_are_other_measurements(monkeypatch):
    assert Sizes().digest() == Sizes().digest()
    assert Sizes(device_blocks=65).digest() != Sizes().digest()
    assert Sizes(seed=1).digest() != Sizes().digest()
    before = Sizes().digest()
    monkeypatch.setattr("configs.settings._DEFAULT_STEP_TOKENS", {"cpu": 64, "cuda": 64})
    assert Sizes().digest() != before


@pytest.fixture
def small_run(monkeypatch, tmp_path):
    """The whole program with servers that are not there: each request is answered at once."""
    said = {
        "models": "40m",
        "arms": f"{BASE},{EXACT},lmcache",
        "workloads": "long-document-qa",
        "working_sets": "0.5,1.5",
        "alternations": 2,
        "device_blocks": 64,
        "dtype": None,
        "requests_per_s": None,
        "seed": 0,
    }
    plan = choose(**{name: value for name, value in said.items() if name not in ("dtype", "requests_per_s")}).plan
    workload = long_document_qa(random.Random(0), WORDS, documents=1, document_tokens=10, repeats=1)
    cases = [Case(workload, size) for size in plan.working_sets]
    served = []

    def one_server(plan, arm, wanted, journal, logs, port, start_s, title, watch):
        for wanted_key in wanted:
            if one_server.breaks_after == len(served):
                raise one_server.error
            served.append(wanted_key)
            journal.add(wanted_key, figures=figures(ANSWERS, 0.0, 1.0, 1), requests=[])

    one_server.breaks_after, one_server.error = None, KeyboardInterrupt()
    monkeypatch.setattr(measuring, "cases_of", lambda *_: cases)
    monkeypatch.setattr(measuring, "_one_server", one_server)
    monkeypatch.setattr("load_tests.bench.arms.missing_packages", list)
    monkeypatch.setattr(program, "become_subreaper", lambda: None)
    monkeypatch.setattr(program, "draw", lambda *_: [])

    def run(**options):
        program.main(results=tmp_path, **{**said, "json_file": None, "port": None, **options})

    run.served, run.server, run.plan, run.folder = served, one_server, plan, tmp_path
    return run


def test_arms_alternate_and_every_measurement_is_made_once(small_run):
    small_run()
    assert [(entry.alternation, entry.arm) for entry in small_run.served[::2]] == [
        (0, BASE),
        (0, EXACT),
        (1, EXACT),
        (1, BASE),
    ]
    assert sorted(small_run.served) == sorted(small_run.plan.keys())
    assert json.loads((small_run.folder / "bench.json").read_text())["rows"]


def test_an_interrupted_run_goes_on_where_it_stopped(small_run, capsys):
    small_run.server.breaks_after = 3
    with pytest.raises(typer.Exit) as ended:
        small_run()
    assert ended.value.exit_code == 130
    assert "Interrupted: 3 of 8 kept; the same command goes on." in capsys.readouterr().err
    small_run.server.breaks_after = None
    small_run()
    assert sorted(small_run.served) == sorted(small_run.plan.keys())


def test_a_server_that_fails_ends_the_run_with_its_words_and_keeps_the_rest(small_run, capsys):
    small_run.server.breaks_after, small_run.server.error = 2, ServerError("The server ended with code 1.")
    with pytest.raises(typer.Exit) as ended:
        small_run()
    assert ended.value.exit_code == 2
    assert "The server ended with code 1." in capsys.readouterr().err
    small_run.server.breaks_after = None
    small_run()
    assert len(small_run.served) == 8


def test_the_json_can_go_to_stdout(small_run, capsys):
    small_run(json_file="-")
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 4


@pytest.mark.parametrize("rests", [True, False])
def test_a_measurement_says_when_its_server_had_not_come_to_rest(
    rests: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One server's turn, with a process that is no server and answers that were made up."""
    plan = choose(models="10m", arms=EXACT, device_blocks=16).plan
    workload = long_document_qa(random.Random(0), WORDS, documents=1, document_tokens=10, repeats=1)
    this = psutil.Process()

    @contextlib.contextmanager
    def running(command, url, ready, log, start_s):
        yield measuring.ServerProcess(url, this, log)

    monkeypatch.setattr(measuring, "running", running)
    monkeypatch.setattr(measuring, "model_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(measuring, "_warm_up", lambda folder: workload)
    monkeypatch.setattr(measuring, "_send", lambda server, model, workload, body, watch: list(ANSWERS))
    monkeypatch.setattr(measuring, "REST_S", 0.0)
    monkeypatch.setattr(measuring, "wait_until_quiet", lambda process: rests)
    said: list[str] = []
    watch = measuring.Watch(now=lambda text: None, done=lambda request: None, measured=said.append)
    key = Key("10m", 0, EXACT, workload.name, 1.5)
    journal: Journal[Key] = Journal(tmp_path / "journal.jsonl")
    measuring._one_server(plan, ARMS[EXACT], {key: Case(workload, 1.5)}, journal, tmp_path, 8000, 1.0, "10m", watch)
    assert any("had not come to rest" in line for line in said) is not rests
    (kept,) = journal.of([key])
    assert (kept["figures"]["requests"], len(kept["requests"])) == (2, 2)
