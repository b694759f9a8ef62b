"""`make observe` starts what is installed, says how to get what is not, and ends what it started."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import yaml

from app.observe import __main__ as observe
from app.observe.configuration import Ports, write_grafana, write_prometheus
from configs.model_folder import PROJECT_ROOT

STUB = """#!{python}
import json, os, signal, sys, time
json.dump({{"arguments": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid()}}, open("{said}.part", "w"))
os.rename("{said}.part", "{said}")
{then}
"""
FOREVER = "time.sleep(600)"


def install(folder: Path, name: str, then: str = FOREVER) -> Path:
    """A program of this name that writes down how it was started."""
    folder.mkdir(exist_ok=True)
    said = folder / f"{name}.json"
    program = folder / name
    program.write_text(STUB.format(python=sys.executable, said=said, then=then))
    program.chmod(0o755)
    return said


def started(tmp_path: Path, bin_folder: Path, **environment: str) -> subprocess.Popen[str]:
    folder = str(tmp_path / "observe")
    program = "import sys, pathlib; from app.observe.__main__ import main; "
    program += f"sys.exit(main(['--port', '8123'], pathlib.Path({folder!r})))"
    more = {"PATH": str(bin_folder), "PYTHONPATH": str(PROJECT_ROOT), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **more}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(path: Path) -> dict:
    for _ in range(1200):
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        time.sleep(0.1)
    raise AssertionError(f"{path} was not written")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_without_either_it_says_how_to_get_them(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert observe.main([], tmp_path / "observe") == 1
    said = capsys.readouterr().err
    assert "apt-get install prometheus" in said
    assert "configs/grafana/crosskv.json" in said


def test_both_are_started_on_loopback_for_the_servers_port_and_ended_with_it(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    said = [install(programs, name) for name in ("prometheus", "grafana-server")]
    running = started(tmp_path, programs, CROSSKV_METRICS_KEY="a-key-of-the-test")
    prometheus, grafana = map(wait_for, said)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=120)

    assert running.returncode == 0, err
    assert "http://127.0.0.1:8123/metrics" in out
    assert "a-key-of-the-test" not in out + err + json.dumps([prometheus, grafana])
    assert "--web.listen-address=127.0.0.1:9090" in prometheus["arguments"]
    assert grafana["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert not is_alive(prometheus["pid"])
    assert not is_alive(grafana["pid"])


def test_one_alone_is_started_and_the_other_named(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    said = install(programs, "prometheus")
    running = started(tmp_path, programs)
    wait_for(said)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 0
    assert "grafana is not installed" in err


def test_one_that_ends_by_itself_ends_the_other_and_its_log_is_named(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    said = install(programs, "prometheus")
    install(programs, "grafana-server", then="sys.exit(3)")
    running = started(tmp_path, programs)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 1
    assert "grafana has ended (3)" in err
    assert "grafana.log" in err
    assert not said.exists() or not is_alive(wait_for(said)["pid"])


def test_prometheus_watches_the_chosen_port_with_the_projects_alerts(tmp_path: Path) -> None:
    config = yaml.safe_load(write_prometheus(tmp_path, Ports(8123), None).read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["127.0.0.1:8123"]}]
    assert scrape["job_name"] == "crosskv"
    assert "authorization" not in scrape
    assert [Path(name).is_file() for name in config["rule_files"]] == [True]


def test_a_key_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics_key").touch(0o644)
    config = yaml.safe_load(write_prometheus(tmp_path, Ports(8123), "a-key").read_text())
    path = Path(config["scrape_configs"][0]["authorization"]["credentials_file"])
    assert path.read_text(encoding="utf-8") == "a-key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_grafana_finds_prometheus_and_the_dashboard(tmp_path: Path) -> None:
    environment = write_grafana(tmp_path, Ports(8123, prometheus=9191))
    provisioning = Path(environment["GF_PATHS_PROVISIONING"])
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://127.0.0.1:9191"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "crosskv.yaml").read_text())["providers"]
    dashboard = Path(provider["options"]["path"]) / "crosskv.json"
    assert json.loads(dashboard.read_text())["uid"] == "crosskv"
    assert environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == str(dashboard)
