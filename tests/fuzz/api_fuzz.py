"""Sends requests of all kinds to a running ingress and holds every answer against its own OpenAPI description."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import hostile
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.dialects.errors import MOST_CHARACTERS
from load_tests.harness.patience import patience

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
DEADLINE_S = 120.0
"""An answer that is not there by then is a hang; generous, since the machine may be busy with other things."""
MOST_SHOWN = 40
OTHER_METHODS = ("HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "GET", "POST")


@dataclass
class Report:
    """What was sent, by (route, key, status class), and what went wrong: a sentence with a curl command each."""

    seed: int
    answers: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        """Requests sent."""
        return self.answers.total()

    def fail(self, what: str, curl: str) -> None:
        """Note a failure; of those that read alike, the first."""
        self.failures.setdefault(what, curl)

    def table(self) -> str:
        """The cases by route and status class."""
        classes = sorted({status for _, _, status in self.answers})
        lines = [f"{'route':34}" + "".join(f"{status:>8}" for status in classes)]
        for route in sorted({route for route, _, _ in self.answers}):
            counts = [
                sum(n for (r, _, s), n in self.answers.items() if (r, s) == (route, status)) for status in classes
            ]
            lines.append(f"{route:34}" + "".join(f"{count:>8}" for count in counts))
        for key in sorted({key for _, key, _ in self.answers}):
            counts = [sum(n for (_, k, s), n in self.answers.items() if (k, s) == (key, status)) for status in classes]
            lines.append(f"{'key: ' + key:34}" + "".join(f"{count:>8}" for count in counts))
        return "\n".join(lines)


ENDLESS = {"/api/v1/events"}
"""Routes whose answers have no end; `tests/app/events` asks them."""


class ApiFuzz:
    """One run against one server."""

    def __init__(self, url: str, keys: Sequence[tuple[str, str | None]], random_seed: int) -> None:
        """`keys`: who asks in turn, a name and an API key, None for a request without one; first a right one."""
        self.url = url
        self.keys = keys
        self.report = Report(random_seed)
        self._session = requests.Session()
        self._turns = itertools.cycle(keys)
        described = self._session.get(f"{url}/openapi.json", timeout=patience(DEADLINE_S)).json()
        self._schema = schemathesis.openapi.from_dict(described)
        self._components = described["components"]["schemas"]
        operations = [found.ok() for found in self._schema.get_all_operations()]
        self._operations = [operation for operation in operations if operation.path not in ENDLESS]

    def run(self, cases: int) -> Report:
        """Send about `cases` requests and not fewer, spread over all routes."""
        with_body = [operation for operation in self._operations if operation.body]
        quota = math.ceil(cases / (3 * len(with_body)))
        for operation in self._operations:
            kinds = [
                operation.as_strategy(generation_mode=GenerationMode.POSITIVE).map(_for_the_one_model),
                operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
            ]
            if operation in with_body:
                kinds.append(self._hostile(operation))
            for number, kind in enumerate(kinds):
                self._send_all(kind, quota, self.report.seed + number)
        for path in {operation.path for operation in self._operations}:
            self._try_other_methods(path)
        return self.report

    def _hostile(self, operation: Any) -> Any:
        content = operation.definition.raw["requestBody"]["content"]["application/json"]["schema"]
        either = content.get("anyOf", [content])  # a body that need not be there is null, or that
        models = [one["$ref"].rpartition("/")[2] for one in either if "$ref" in one]
        fields = [name for model in models for name in self._components[model]["properties"]]
        return hostile.bodies(operation.path, fields).map(
            lambda body: operation.Case(
                path_parameters=dict.fromkeys(re.findall(r"{(\w+)}", operation.path), "nobody"),
                body=body,
                media_type="application/json",
            )
        )

    def _send_all(self, cases: Any, count: int, number: int) -> None:
        @seed(number)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases)
        def send(case: Any) -> None:
            self._send(case)

        with contextlib.suppress(Unsatisfiable):  # a route without parameters can be asked in one way only
            send()

    def _send(self, case: Any) -> None:
        name, key = next(self._turns)
        headers = _bearer(key)
        route = f"{case.method.upper()} {case.path}"
        with self._noted(route, lambda: case.as_curl_command(headers=headers)):
            answer = case.call(base_url=self.url, headers=headers, session=self._session, timeout=patience(DEADLINE_S))
            self.report.answers[route, name, f"{answer.status_code // 100}xx"] += 1
            case.validate_response(answer, checks=CHECKS, headers=headers)
            _check_words(answer)
            needs_key = bool(case.operation.definition.raw.get("security"))
            if needs_key and name in ("none", "wrong") and answer.status_code != 401:
                raise AssertionError(f"{answer.status_code} with {name} key")

    def _try_other_methods(self, path: str) -> None:
        own = {operation.method.upper() for operation in self._operations if operation.path == path}
        headers = _bearer(self.keys[0][1])
        for method in OTHER_METHODS:
            if method in own:
                continue
            target = self.url + path.replace("{job_id}", "x")
            with self._noted(f"{method} {path}", lambda m=method, t=target: f"curl -X {m} {t}"):
                answer = self._session.request(method, target, headers=headers, timeout=patience(DEADLINE_S))
                self.report.answers["other methods", "right", f"{answer.status_code // 100}xx"] += 1
                if answer.status_code == 403:  # /metrics: its key comes before its methods
                    continue
                assert answer.status_code == 405, f"{answer.status_code} to {method}"
                assert own <= set(answer.headers.get("allow", "").replace(",", " ").split()), "no Allow header"

    @contextlib.contextmanager
    def _noted(self, route: str, curl: Callable[[], str]) -> Iterator[None]:
        try:
            yield
        except requests.Timeout:
            self.report.fail(f"{route}: no answer in {patience(DEADLINE_S):.0f} s", curl())
        except (Exception, FailureGroup) as error:
            several = getattr(error, "exceptions", [error])
            for one in several:
                what = re.sub(r"[0-9a-f]{8,}", "…", " ".join(str(one).split()))  # ids would make each failure its own
                self.report.fail(f"{route}: {type(one).__name__}: {what[:300]}", curl())


def _for_the_one_model(case: Any) -> Any:
    """A made-up model is 404, none is 400, and nothing else of the request is looked at."""
    if isinstance(case.body, dict) and (case.path.startswith("/v1/") or "model" in case.body):
        case.body["model"] = "demo"
    return case


def _check_words(answer: requests.Response) -> None:
    """An error's message is a sentence or two of this server's, and nothing of a library's."""
    body = answer.json() if answer.headers.get("content-type") == "application/json" else None
    error = body.get("error") if isinstance(body, dict) else None
    if answer.status_code >= 400 and isinstance(error, dict):
        message = error["message"]
        assert 0 < len(message) <= MOST_CHARACTERS, f"a message of {len(message)} characters"
        for words in ("pydantic", "validation error", "Input should be"):
            assert words not in message, message


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}
