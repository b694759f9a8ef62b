"""What the command line says, checked before anything runs: a wrong word costs no minute and writes no file."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.machine.cores import cores
from load_tests.simulator.cluster.routers import router_names
from load_tests.simulator.costs import Costs, CostsError
from load_tests.simulator.one_replica.oracle import NextUses
from load_tests.simulator.one_replica.replay import BELADY, Setup, make_manager
from load_tests.simulator.policies import simulated_names
from load_tests.simulator.trace import BLOCK_TOKENS, TraceError, TraceRequest, read_trace

DEFAULT_ROUTER = "ours"
ALL = "all"
MOST_BLOCKS = 10**12


class OptionError(ValueError):
    """A command that cannot be carried out. One sentence."""


@dataclass(frozen=True, slots=True)
class Job:
    """A checked command."""

    trace: list[TraceRequest]
    setups: list[Setup]
    costs: Costs
    processes: int


def make_job(
    trace: str,
    capacity: str,
    policy: str,
    replicas: str,
    router: str | None,
    device_blocks: str,
    redis_blocks: str,
    rate_scale: str | None,
    requests: str | None,
    seed: str,
    costs: str | None,
    jobs: str | None,
) -> Job:
    """Return what the options ask for. Raises OptionError."""
    num_replicas = _number("--replicas", replicas, 1, 10_000)
    setups = [
        Setup(
            policy=name,
            capacity_blocks=blocks,
            device_blocks=_number("--device-blocks", device_blocks, 0, MOST_BLOCKS),
            redis_blocks=_number("--redis-blocks", redis_blocks, 0, MOST_BLOCKS),
            replicas=num_replicas,
            router=route,
            rate_scale=None if rate_scale is None else _rate("--rate-scale", rate_scale),
            seed=_number("--seed", seed, 0, 2**63 - 1),
        )
        for name in _policies(policy)
        for route in _routers(router, num_replicas)
        for blocks in _numbers("--capacity", capacity, 1, MOST_BLOCKS)
    ]
    routed = setups[0].router is not None
    if routed and not setups[0].device_blocks:
        raise OptionError("--device-blocks must say how many blocks each replica's pool has, when there is a router.")
    if routed and any(setup.policy == BELADY for setup in setups):
        raise OptionError(f"--policy {BELADY} knows the future of one replica only, not behind a router.")
    if rate_scale is not None and not routed:
        raise OptionError("--rate-scale needs a router: one replica serves requests one after the other.")
    most_requests = None if requests is None else _number("--requests", requests, 1, MOST_BLOCKS)
    processes = cores() if jobs is None else _number("--jobs", jobs, 1, 1024)
    try:
        job = Job(
            read_trace(trace, most_requests),
            setups,
            Costs() if costs is None else Costs.from_file(costs),
            processes,
        )
    except (TraceError, CostsError) as error:
        raise OptionError(str(error)) from None
    largest = max(len(request.hash_ids) - (-request.output_tokens // BLOCK_TOKENS) for request in job.trace)
    if routed and setups[0].device_blocks < largest:
        raise OptionError(f"--device-blocks must be at least {largest}: a request of {trace} needs that many.")
    return job


def check_output(option: str, file: str, *inputs: str) -> None:
    """Raise OptionError if ``file`` is an input or, judged without writing, cannot be written."""
    path = Path(file)
    folder = path.parent
    if path.is_dir():
        reason = "it is a folder"
    elif any(path.exists() and path.samefile(read) for read in inputs if Path(read).exists()):
        reason = "it is an input"
    elif not folder.is_dir():
        reason = f"there is no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise OptionError(f"{option}: {file} cannot be written ({reason}).")


def _policies(text: str) -> list[str]:
    known = [*simulated_names(), BELADY]
    names = _names("--policy", text, known)
    for name in names:
        if name not in known and ":" not in name:
            raise OptionError(
                f"--policy: unknown policy {name!r}; choose {', '.join(known)}, {ALL}, or a class as module:Class."
            )
        try:
            make_manager(Setup(name, 1), NextUses(()))
        except ValueError as error:
            raise OptionError(f"--policy: {error}.") from None
    return names


def _routers(text: str | None, replicas: int) -> list[str] | list[None]:
    if text is None and replicas == 1:
        return [None]
    known = router_names()
    names = [DEFAULT_ROUTER] if text is None else _names("--router", text, known)
    for name in names:
        if name not in known:
            raise OptionError(f"--router: unknown router {name!r}; choose {', '.join(known)}, or {ALL}.")
    return names


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise OptionError(f"{option} must be names separated by commas, got {text!r}.")
    return list(dict.fromkeys(each for name in names for each in (known if name == ALL else [name])))


def _numbers(option: str, text: str, least: int, most: int) -> list[int]:
    return list(dict.fromkeys(_number(option, part, least, most) for part in text.split(",")))


def _number(option: str, text: str, least: int, most: int) -> int:
    digits = text.strip()
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 20 else -1
    if not least <= number <= most:
        raise OptionError(f"{option} must be a whole number from {least} to {most}, got {text!r}.")
    return number


def _rate(option: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise OptionError(f"{option} must be a number above 0, got {text!r}.")
    return rate
