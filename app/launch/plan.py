"""What `make serve` is going to start: serve_config.yaml, a preset and the overrides, merged and checked."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from app.checks.before_start import Check, Said, checks_of
from app.gate.bound_host import require_guarded
from app.launch.memory import check_memory, shared_memory_warning
from app.launch.run_folder import require_writable, run_folder
from app.launch.surroundings import require_surroundings, surroundings_warnings
from configs import machine
from configs.machine.cores import cores
from configs.presets import find_preset
from configs.settings import Settings, SettingsError, load_settings


@dataclass(frozen=True)
class Overrides:
    """What the command line replaces in serve_config.yaml; None leaves the file's value."""

    port: int | None = None
    model: str | None = None
    replicas: int | None = None
    device_blocks: int | None = None
    max_model_len: int | None = None
    scenario: str | None = None

    @classmethod
    def parse(cls, model: str | None, scenario: str | None = None, **numbers: str | None) -> Overrides:
        """From a command line's words. Raises SettingsError, as `make_plan` does."""
        return cls(
            model=model, scenario=scenario, **{name: _whole_number(name, text) for name, text in numbers.items()}
        )

    def as_args(self) -> dict[str, Any]:
        """The overrides as a fragment of `args:`. A preset's name brings the preset's own settings along."""
        args: dict[str, Any] = {}
        if self.model is not None:
            args = find_preset(self.model) or {"model": self.model}
        if self.device_blocks is not None:
            args = merge(args, {"engine": {"device_blocks": self.device_blocks}})
        if self.replicas is not None:
            args["replicas"] = self.replicas
        if self.max_model_len is not None:
            args["max_model_len"] = self.max_model_len
        if self.scenario is not None:
            args["scenario"] = self.scenario
        return args


@dataclass(frozen=True)
class LaunchPlan:
    """A checked configuration: `serve_config` is Serve's own schema, ready to be written and run."""

    serve_config: dict[str, Any]
    settings: Settings
    app_name: str
    host: str
    port: int
    warnings: tuple[str, ...] = ()
    """What the server will lack, or what will be slow, and what would help; to be said at the start."""

    @property
    def address(self) -> str:
        """Where this machine reaches the server."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def run_folder(self) -> Path:
        """Where this server's merged configuration and log lie."""
        return run_folder(self.port)


def make_plan(config_path: Path, overrides: Overrides, running: LaunchPlan | None = None) -> LaunchPlan:
    """Read, merge and check. The port may be in use by the `running` server, which will have ended by then.

    Raises:
        SettingsError: one sentence that names what is wrong and what would work.
    """
    plan = read_plan(config_path, overrides)
    found = [check.look() for check in checks_before(plan, running)]
    return replace(plan, warnings=tuple(said.words for said in found if not said.well))


def read_plan(config_path: Path, overrides: Overrides) -> LaunchPlan:
    """Read and merge, and look at nothing but the settings themselves. Raises SettingsError, as `make_plan` does."""
    config = _read(config_path)
    application = _only_application(config, config_path)
    application["args"] = merge(application.get("args") or {}, overrides.as_args())
    options = config.get("http_options") or {}
    if not isinstance(options, dict):
        raise SettingsError(f"{config_path}: `http_options:` must hold settings by name, such as `port: 8000`.")
    http = config["http_options"] = dict(options)
    if overrides.port is not None:
        http["port"] = overrides.port
    host, port = str(http.get("host", "127.0.0.1")), http.get("port", 8000)
    if not isinstance(port, int) or not 1 <= port <= 65535:
        raise SettingsError(f"http_options.port: {port!r} is not a port; use a number from 1 to 65535.")
    settings = load_settings(application["args"])
    return LaunchPlan(config, settings, str(application.get("name", "default")), host, port)


def checks_before(plan: LaunchPlan, running: LaunchPlan | None = None) -> list[Check]:
    """All that has to hold before Ray starts, in order: of the settings, and of this machine.

    `running`: the server whose place the plan's is to take.
    """
    settings, host, port = plan.settings, plan.host, plan.port

    def guarded() -> Said:
        require_guarded(settings, host)
        return Said(f"keys: {len(settings.http.keys)}" if settings.http.keys else "no key is needed")

    def free() -> Said:
        if running is not None and running.port == port:
            return Said(f"{host}:{port} is the running server's")
        _check_free(host, port)
        return Said(f"{host}:{port} is free")

    def folder() -> Said:
        require_writable(plan.run_folder)
        return Said(f"{plan.run_folder} can be written")

    def surroundings() -> Said:
        require_surroundings()
        warnings = surroundings_warnings()
        return Said("\n".join(warnings) or "paths, files and the interpreter are as they have to be", not warnings)

    def memory() -> Said:
        check_memory(settings)
        warning = shared_memory_warning(settings, running.settings if running else None)
        return Said(warning or "all parts fit this machine's memory", well=warning is None)

    return [
        Check("http.api_keys", guarded),
        *checks_of(settings),
        Check("surroundings", surroundings),
        Check("memory", memory),
        Check("engine.threads", lambda: _cores(settings)),
        Check("run folder", folder),
        Check("http_options.port", free),
    ]


def _cores(settings: Settings) -> Said:
    """Engines whose threads wait for each other spin, and take the cores from those that compute."""
    threads, have = settings.max_replicas * settings.replica_threads, cores()
    if machine.accelerator() != "cpu" or settings.replica_threads == 1 or threads <= have:
        return Said(f"{threads} threads of replicas, {have} cores")
    return Said(
        f"engine.threads: {settings.max_replicas} replicas of {settings.replica_threads} threads are {threads}, and "
        f"this machine has {have} cores, so a request may take 10 times as long; use "
        f"{max(1, have // settings.max_replicas // settings.engine.tensor_parallel_size)}, or fewer replicas.",
        well=False,
    )


def _whole_number(name: str, text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        raise SettingsError(f"{name.upper()}: {text!r} is not a whole number; write it in digits.") from None


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings as one; `above` wins, section by section."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _read(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read ({error.strerror}); give the path of a Serve configuration."
        ) from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not text in UTF-8; save it as that.") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise SettingsError(f"{path}{line} is not YAML: {getattr(error, 'problem', error)}.") from None
    if not isinstance(config, dict):
        raise SettingsError(f"{path} holds no settings; start from the serve_config.yaml that comes with crosskv.")
    return config


def _only_application(config: dict[str, Any], path: Path) -> dict[str, Any]:
    applications = config.get("applications")
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise SettingsError(f"{path}: `applications:` must list exactly one application, with import_path and args.")
    application: dict[str, Any] = applications[0]
    if not isinstance(application.get("args") or {}, dict):
        raise SettingsError(f"{path}: `args:` must hold settings by name.")
    return application


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            another = port + 1 if port < 65535 else 8001
            raise SettingsError(
                f"http_options: {host}:{port} cannot be listened on ({error.strerror}); "
                f"stop what uses it, or choose another port with PORT=, such as PORT={another}."
            ) from None
