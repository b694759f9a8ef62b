"""Locust against any OpenAI-compatible server: `locust -f load_tests/locust/locustfile.py --host http://127.0.0.1:8000`

`make load-test` runs it with a summary, and starts a server where none runs. By itself it takes all of Locust's
options: classes by name (`ChatUser DocumentUser ColdUser`; default: all), `--users`, `--run-time`, `--headless`, or
its page; and those below (`--help`, at the end). docs/tools/load_test.md explains the rows.

The model is asked for before a run, and its tokenizer measured with one request; a headless run that cannot have the
model ends with exit code 2 and one sentence.
"""

from __future__ import annotations

import itertools
import logging
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import gevent
from locust import LoadTestShape, events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner, Runner, WorkerRunner
from locust.web import WebUI

from load_tests.locust.server import ServerUnusableError, find_model, tokens_per_character
from load_tests.locust.shapes import SHAPES
from load_tests.locust.summary import Record
from load_tests.locust.users import ChatUser, ColdUser, Conversing, DocumentUser, Target

__all__ = ["ChatUser", "ChosenShape", "ColdUser", "DocumentUser"]  # what Locust looks for in a locustfile

EXIT_USAGE = 2
WRITE_EVERY_S = 1.0
DEFAULT_RUN_S = 60.0

logger = logging.getLogger(__name__)


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """The options of this file; most are fields of the page's form too."""
    group = parser.add_argument_group("Conversations")
    group.add_argument("--model", help="The model's id. Default: the first that the server lists.")
    parser.add_argument(
        "--api-key", env_var="OPENAI_API_KEY", include_in_web_ui=False, help="The server's key, if it wants one."
    )
    group.add_argument("--shape", choices=list(SHAPES), default="steady", help="How the number of users changes.")
    group.add_argument("--think-s", type=float, default=1.0, help="Mean pause between a user's turns, in seconds.")
    group.add_argument("--answer-tokens", type=int, default=64, help="Most tokens of an answer.")
    group.add_argument("--seed", type=int, default=0, help="Equal seeds give equal questions.")
    parser.add_argument("--summary-file", include_in_web_ui=False, help="Where to keep the run's figures, as JSON.")


@events.init.add_listener
def prepare(environment: Environment, web_ui: WebUI | None, **_: Any) -> None:
    """Listen to the run. Ends the process when a headless run cannot have its model."""
    options, runner = environment.parsed_options, environment.runner
    assert options is not None  # Locust's own main() parsed them
    if options.headless and not options.worker:
        try:
            find_model(environment.host or "", options.model, options.api_key)
        except ServerUnusableError as problem:
            logger.error(problem)
            raise SystemExit(EXIT_USAGE) from None
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else a line for each request
    if runner is not None and not options.worker:
        _end_at_interrupt(runner, web_ui)
    run = Run(environment, options)
    environment.events.test_start.add_listener(run.start)
    environment.events.test_stop.add_listener(run.stop)
    if isinstance(runner, WorkerRunner):
        environment.events.report_to_master.add_listener(run.send)
    else:
        if isinstance(runner, MasterRunner):
            environment.events.worker_report.add_listener(run.receive)
        if options.summary_file:
            environment.events.quitting.add_listener(run.write)
            gevent.spawn(run.keep_writing)


def _end_at_interrupt(runner: Runner, web_ui: WebUI | None) -> None:
    """Let the first Ctrl-C end the run in order. A KeyboardInterrupt hits any greenlet, and its request is lost."""

    def end() -> None:
        watcher.cancel()
        runner.quit()
        if web_ui is not None:
            web_ui.stop()

    watcher = gevent.signal_handler(signal.SIGINT, end)


class ChosenShape(LoadTestShape):
    """The shape that `--shape`, or the page's form, names, over `--users` and `--run-time`."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Users now, and how many start or stop a second; None at the end."""
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        assert options is not None
        users, run_s = options.num_users or 1, options.run_time or DEFAULT_RUN_S
        share = self.get_run_time() / run_s
        return (SHAPES[options.shape](users, share), options.spawn_rate or users) if share < 1 else None


class Run:
    """What Locust's events mean for the users and for the record."""

    def __init__(self, environment: Environment, options: Namespace) -> None:
        self.environment = environment
        self.options = options
        self.record = Record()
        self.model: str | None = None

    def start(self, **_: Any) -> None:
        """Tell the users where to go."""
        self._begin()
        host, key = self.environment.host or "", self.options.api_key
        Conversing.target = None
        try:
            served = find_model(host, self.options.model or None, key)
            self.model = served.model
            if isinstance(self.environment.runner, MasterRunner):
                return
            per_character = tokens_per_character(served, key)
        except ServerUnusableError as problem:
            logger.error(problem)
            self.environment.events.request.fire(
                request_type="GET", name="/v1/models", response_time=0, response_length=0, exception=problem, context={}
            )
            return
        worker = getattr(self.environment.runner, "worker_index", 0)
        Conversing.target = Target(
            served,
            per_character,
            key,
            self.options.think_s,
            self.options.answer_tokens,
            self.options.seed,
            self.record,
            itertools.count(worker * 1_000_000),  # no two workers number users alike
        )
        self._begin()  # a server's first request may have taken seconds

    def _begin(self) -> None:
        self.record.start()
        if self.environment.shape_class is not None:
            self.environment.shape_class.reset_time()

    def stop(self, **_: Any) -> None:
        """The figures stand."""
        self.record.stop()
        self.write()

    def send(self, data: dict[str, Any], **_: Any) -> None:
        """From a worker to its master."""
        data["samples"] = self.record.take()

    def receive(self, data: dict[str, Any], **_: Any) -> None:
        """The master's part."""
        self.record.add(data["samples"])

    def keep_writing(self) -> None:
        """So that a run that is killed leaves what it had, and its watchers see it grow."""
        while True:
            gevent.sleep(WRITE_EVERY_S)
            if self.record.running:
                self.write()

    def write(self, **_: Any) -> None:
        """To `--summary-file`, if there is one."""
        if not self.options.summary_file:
            return
        runner = self.environment.runner
        facts = {
            "server": self.environment.host,
            "model": self.model,
            "shape": self.options.shape,
            "seed": self.options.seed,
            "users": runner.user_count if runner else 0,
        }
        self.record.write(Path(self.options.summary_file), facts)
