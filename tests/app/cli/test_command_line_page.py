"""docs/tools/command_line.md has the commands, options and advice that there are.

`python tests/app/cli/test_command_line_page.py` prints the tables as they have to be.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import typer.main

from app.cli.__main__ import app
from app.cli.doctor.command import RULES
from configs.model_folder import PROJECT_ROOT

PAGE = PROJECT_ROOT / "docs" / "tools" / "command_line.md"
COMMON = {"--url", "--key-file", "--json"}


def command_rows() -> Iterator[str]:
    """One row for each command: its help's first sentence, and the options that are its own."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        arguments = [one.metavar or one.name.upper() for one in command.params if one.param_type_name == "argument"]
        options = [max(one.opts, key=len) for one in command.params if one.param_type_name == "option"]
        own = ", ".join(f"`{option}`" for option in options if option not in COMMON)
        does = " ".join((command.help or "").split()).split(". ")[0].rstrip(".")
        yield f"| `{' '.join(['crosskv', name, *arguments])}` | {does} | {own} |"


def advice_rows() -> Iterator[str]:
    """One row for each rule: the first sentence of its docstring."""
    for rule in RULES:
        sentence = " ".join((rule.advise.__doc__ or "").split()).split(". ")[0].rstrip(".")
        yield f"| `{rule.name}` | {sentence} |"


def test_the_page_has_every_command_and_every_advice_as_they_are() -> None:
    rows = re.findall(r"^\| `.*", PAGE.read_text(), re.MULTILINE)
    assert [row for row in rows if row.startswith("| `crosskv")] == list(command_rows())
    assert [row for row in rows if re.match(r"\| `[a-z0-9]+(-[a-z0-9]+)+` \|", row)] == list(advice_rows())


def test_every_command_that_asks_a_server_has_the_common_options() -> None:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        options = {option for one in command.params for option in one.opts}
        wanted = {"serve": set(), "check": {"--json"}}.get(name, COMMON)
        assert wanted <= options, name


if __name__ == "__main__":
    print(*command_rows(), *advice_rows(), sep="\n")
