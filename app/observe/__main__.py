"""`make observe`: starts what is installed of Prometheus and Grafana for the server on PORT, until Ctrl-C.

    python -m app.observe [--port 8000]

Both listen on loopback only, and keep their data in `.crosskv/observe`. CROSSKV_METRICS_KEY in the environment is sent
to a server with keys (`http.metrics_key`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from app.observe.configuration import LOOPBACK, Ports, write_grafana, write_prometheus
from configs.own_folder import own_folder

FOLDER = own_folder() / "observe"
KEY = "CROSSKV_METRICS_KEY"
GRAFANA_HOME = Path("/usr/share/grafana")
"""Where its packages put what it serves."""
_POLL_S = 0.2
_STOP_S = 10.0
_HOW = {
    "prometheus": "Debian and Ubuntu: apt-get install prometheus (then: systemctl disable --now prometheus, whose port "
    "this one wants); others: https://prometheus.io/download, with its folder on PATH",
    "grafana": "https://grafana.com/docs/grafana/latest/setup-grafana/installation; the dashboard to import by hand is "
    "configs/grafana/crosskv.json",
}


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    """Start them and wait; return the exit status of the process."""
    parser = argparse.ArgumentParser(prog="make observe", description="Prometheus and Grafana for a running server.")
    parser.add_argument("--port", type=int, default=8000, help="the server's")
    parser.add_argument("--prometheus-port", type=int, default=Ports.prometheus)
    parser.add_argument("--grafana-port", type=int, default=Ports.grafana)
    chosen = parser.parse_args(arguments)
    ports = Ports(chosen.port, chosen.prometheus_port, chosen.grafana_port)
    folder.mkdir(parents=True, exist_ok=True)
    commands = dict(_commands(folder, ports, os.environ))
    for name in _HOW.keys() - commands.keys():
        print(f"{name} is not installed. {_HOW[name]}", file=sys.stderr)
    if not commands:
        return 1
    return _run(commands, folder, ports)


def _commands(folder: Path, ports: Ports, environment: Mapping[str, str]) -> list[tuple[str, tuple[list[str], dict]]]:
    """Of what is installed: the command, and the environment."""
    found: list[tuple[str, tuple[list[str], dict]]] = []
    rest = {name: value for name, value in environment.items() if name != KEY}
    if prometheus := shutil.which("prometheus"):
        config = write_prometheus(folder, ports, environment.get(KEY))
        listen = f"--web.listen-address={LOOPBACK}:{ports.prometheus}"
        command = [prometheus, f"--config.file={config}", f"--storage.tsdb.path={folder / 'prometheus'}", listen]
        found.append(("prometheus", (command, rest)))
    server = shutil.which("grafana-server")
    if grafana := server or shutil.which("grafana"):
        command = [grafana] if server else [grafana, "server"]
        command += ["--homepath", str(GRAFANA_HOME)] if GRAFANA_HOME.is_dir() else []
        found.append(("grafana", (command, rest | write_grafana(folder, ports))))
    return found


def _run(commands: Mapping[str, tuple[list[str], dict]], folder: Path, ports: Ports) -> int:
    """Until Ctrl-C (0), or until one of them ends by itself (1)."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, (command, environment) in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                running[name] = subprocess.Popen(
                    command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            port = ports.prometheus if name == "prometheus" else ports.grafana
            print(f"{name}: http://{LOOPBACK}:{port}   (log: {folder / name}.log)", flush=True)
        print(f"watching http://{LOOPBACK}:{ports.server}/metrics; Ctrl-C ends it", flush=True)
        while True:
            for name, process in running.items():
                if process.poll() is not None:
                    print(f"{name} has ended ({process.returncode}); see {folder / name}.log", file=sys.stderr)
                    return 1
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        return 0
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
