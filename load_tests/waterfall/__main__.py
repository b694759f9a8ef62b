"""Where the time of a request goes: `python -m load_tests.waterfall`

crosskv says it of every request, stage by stage (`X-CrossKV-Stages`); of plain `vllm serve` and Ray Serve LLM only the
whole is known. Each arm has a server of its own, with the same engine, and gets the same prompts; in each alternation
all arms come one after the other, in rotating order. Exit codes: 0 measured; 2 something is missing or wrong.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from app.launch.descendants import become_subreaper
from app.launch.ports import free_port
from configs.settings import SettingsError
from load_tests.bench.choice import default_dtype
from load_tests.harness.client import ServerError
from load_tests.harness.models import SHAPES, ModelError, model_folder, token_counter
from load_tests.harness.server import answering, running
from load_tests.measuring.processes import machine_line, wait_until_quiet
from load_tests.measuring.program import JsonFile, chosen, one_sentence, out, stop_by_signal
from load_tests.measuring.report import deliver
from load_tests.measuring.turns import turns
from load_tests.peers.engine import Peer
from load_tests.waterfall.measure import CASES, CPU, REDIS, Found, measure, require_answers
from load_tests.waterfall.report import Point, as_json, draw, merged, peer_table, stage_table
from load_tests.waterfall.servers import CROSSKV, OTHER, commands
from load_tests.workloads import Words

MAX_MODEL_LEN = 4096
DEVICE_BLOCKS = 1_400
"""16 documents with their questions and answers, and as many questions more."""


def main(
    arms: Annotated[
        str, typer.Option(help="Of crosskv, serve-llm, serve-llm-tuned, vllm, and other with --other.")
    ] = "crosskv",
    cases: Annotated[str, typer.Option(help=f"Of {', '.join(CASES)}.")] = ",".join(CASES),
    concurrency: Annotated[str, typer.Option(help="Requests at a time, with commas between them.")] = "1,16",
    requests: Annotated[int, typer.Option(min=8, help="Tiny prompts of each measurement.")] = 160,
    batches: Annotated[int, typer.Option(min=1, help="How often each document is asked about.")] = 6,
    alternations: Annotated[int, typer.Option(min=1, help="How often each arm has its turn.")] = 1,
    model: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "10m",
    replicas: Annotated[int, typer.Option(min=1)] = 1,
    other: Annotated[Path | None, typer.Option(help="Another checkout of crosskv, for the arm `other`.")] = None,
    start_s: Annotated[float, typer.Option(min=1, help="Longest start of a server, in seconds.")] = 300.0,
    json_file: JsonFile = None,
    plot: Annotated[str | None, typer.Option(help="A PNG file.")] = None,
) -> None:
    """Measure, and print where the time goes."""
    stop_by_signal()
    become_subreaper()
    found: dict[str, list[dict[Point, Found]]] = {}
    with one_sentence(ModelError, ServerError, SettingsError, ValueError), tempfile.TemporaryDirectory() as logs:
        wanted = chosen("case", cases.split(","), CASES)
        starts = commands(other, loads=bool({CPU, REDIS} & set(wanted)))
        names = chosen("arm", arms.split(","), starts)
        sizes = {
            "concurrency": [int(word) for word in concurrency.split(",")],
            "requests": requests,
            "batches": batches,
        }
        folder = model_folder(model)
        text = Words(token_counter(folder))
        for number, arm in turns(names, alternations):
            title = f"alternation {number + 1} of {alternations}, {arm}"
            out.print(f"{title}: starting")
            peer = Peer(str(folder), free_port(), replicas, DEVICE_BLOCKS, MAX_MODEL_LEN, default_dtype())
            with tempfile.TemporaryDirectory(prefix="crosskv-") as scratch:
                command = starts[arm](peer, Path(scratch), free_port())
                log = Path(logs) / f"{arm}-{number}.log"
                url = f"http://127.0.0.1:{peer.port}"
                with running(command, url, answering(url, folder.name), log, start_s) as server:
                    wait_until_quiet(server.process)
                    run = measure(server, folder.name, text, wanted, sizes, f"{number}")
            require_answers(run, title)
            found.setdefault(arm, []).append(run)
    whole = {arm: merged(runs) for arm, runs in found.items()}
    base = CROSSKV if CROSSKV in whole else names[0]
    tables = [peer_table(found, base)] + [stage_table(whole[arm]) for arm in (CROSSKV, OTHER) if arm in whole]
    deliver("\n\n".join([*tables, machine_line()]), as_json(whole, machine_line()), json_file)
    if plot and CROSSKV in whole:
        draw(whole[CROSSKV], plot)


if __name__ == "__main__":
    typer.run(main)
