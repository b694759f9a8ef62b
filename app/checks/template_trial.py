"""What chat templates make of conversations, found out in a process of its own, in which one that computes for ever or
takes all memory is ended.

    python -m app.checks.template_trial SECONDS

It reads JSON, a `Trial`, and writes JSON: each template's name as it begins, then what is wrong, or null. The kernel
ends it after SECONDS of processor time, in native code too; a busy machine refuses nothing.

Leans on transformers: what its environment of Jinja has (`chat_template_utils._cached_compile_jinja_template`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_S = 2.0
"""Of a processor. A template of a model needs some milliseconds."""
MOST_MEMORY_BYTES = 1 << 30
"""Address space of a trial, with Python's own."""
_TIMEOUT_S = 120.0
"""Of a clock, for a machine on which the process does not get to run."""
_MOST_QUOTED = 120
"""Characters of a template's own sentence."""
_TOO_LARGE = "takes too much memory"
_ROOT = Path(__file__).parents[2]
_HELLO, _ANSWER = {"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello to you."}
_PLAIN: tuple[list[Any], ...] = ([_HELLO], [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}])
"""A first turn, with its content in the two forms that templates take; vLLM finds out which."""
_OTHERS: tuple[list[Any], ...] = (
    [{"role": "system", "content": "Be brief."}, _HELLO],
    [_HELLO, _ANSWER, _HELLO],
)
"""What the ingress renders as it starts. A template may refuse them, and has to come to an end."""


class Trial(NamedTuple):
    """Templates by name, one of them `default`, and special tokens by theirs."""

    templates: tuple[tuple[str, str], ...]
    special_tokens: tuple[tuple[str, str], ...]


class Refusal(NamedTuple):
    """A template that cannot be used, and why: a clause whose subject is the template."""

    template: str
    why: str


@functools.lru_cache(maxsize=8)
def tried(trial: Trial) -> Refusal | None:
    """What is wrong with the templates; None where chats can be answered with them. Blocks for a second."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        # -E: what the shell has set for its own programs is not for this one.
        ended = subprocess.run(
            [sys.executable, "-E", "-m", "app.checks.template_trial", str(MOST_S)],
            input=json.dumps(trial).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=_ROOT,
            timeout=_TIMEOUT_S,
            check=False,
        )
        last = json.loads((ended.stdout.splitlines() or [b'"default"'])[-1])
        if ended.returncode == 0:
            return None if last is None else Refusal(*last)
        if ended.returncode != -signal.SIGPROF:
            return Refusal(last, f"ends the Python that tries it (exit code {ended.returncode})")
        return Refusal(last, f"comes to no end within {MOST_S:g} s")
    return Refusal("default", f"comes to no end within {_TIMEOUT_S:g} s")


def refusal(trial: Trial, begin: Callable[[str], None] = lambda name: None) -> Refusal | None:
    """The same in this process, without its limits. `begin` is called with the name of each template that is tried."""
    compiled = {}
    for name, text in trial.templates:
        begin(name)
        try:
            compiled[name] = _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            return Refusal(name, f"is no Jinja in line {error.lineno} ({_short(error)})")
        except RecursionError:
            return Refusal(name, "is too deep to be read")
        except MemoryError:
            return Refusal(name, _TOO_LARGE)
    begin("default")
    why = _why_not(compiled["default"], dict(trial.special_tokens))
    return None if why is None else Refusal("default", why)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, ensure_ascii=False, **{name: it for name, it in options.items() if name in ("indent", "sort_keys")}
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _why_not(template: jinja2.Template, special_tokens: dict[str, str]) -> str | None:
    """Why a first turn gets no prompt; None where it does."""
    made, failures = [], []
    for messages in (*_PLAIN, *_OTHERS):
        try:
            prompt = template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **special_tokens
            )
        except MemoryError:
            return _TOO_LARGE
        except Exception as error:  # a template may do anything, and each failure is one of it
            failures.append(_short(error))
        else:
            made += [prompt] * (messages in _PLAIN)
    if not made:
        return f"refuses a plain message from a user ({failures[0]})"
    return None if any(prompt.strip() for prompt in made) else "makes nothing of a message from a user"


def _short(error: Exception) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= _MOST_QUOTED else f"{said[:_MOST_QUOTED]}…"


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


class _Generation(Extension):
    """`{% generation %}`: marks what an assistant says, for training; here it says what is in it."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """See Jinja's."""
        line = next(parser.stream).lineno
        return nodes.Scope(list(parser.parse_statements(("name:endgeneration",), drop_needle=True)), lineno=line)


def main() -> None:
    """See the module's docstring."""
    trial = Trial(*json.load(sys.stdin))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES if most < 0 else min(most, MOST_MEMORY_BYTES), most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))  # unhandled, SIGPROF ends the process in native code too
    print(json.dumps(refusal(trial, begin=lambda name: print(json.dumps(name), flush=True))))


if __name__ == "__main__":
    main()
