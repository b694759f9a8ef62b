"""Writes the routes into docs/guide/http_api.md: `python -m app.document`; with `--check` it only compares.

What stands above the page's marker is written by hand; what follows is made of the OpenAPI description
(`app.openai.openapi_schema`). Loads vLLM and the demo model's tokenizer: some ten seconds, no weights, no Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterator, Sequence
from http import HTTPStatus
from textwrap import fill
from typing import TYPE_CHECKING, Any, cast

from app.backend.protocols import Backend
from configs.model_folder import PROJECT_ROOT
from configs.settings import load_settings
from deployments.engine.engine_args import engine_args, engine_environment
from kvmanager.segments.server_secret import SECRET_BYTES, ServerSecret

if TYPE_CHECKING:
    from app.openai.openapi_schema import RouteField

PAGE = PROJECT_ROOT / "docs" / "guide" / "http_api.md"
MARKER = "<!-- Written by `python -m app.document` from here on. The routes in app/ say what stands below. -->\n"
MOST_EXPLAINED_FIELDS = 7
"""A body with more fields is vLLM's own: /docs of a running server explains them."""
_GROUPS = (
    ("Anthropic's API", ("/v1/messages",)),
    ("OpenAI's API", ("/v1/", "/tokenize", "/detokenize")),
    ("The cache", ("/api/v1/kv/",)),
    ("The server's state", ("/",)),
)
_SAID_ABOVE = ("Nothing is known of it.", "The manager refuses, and says why.", "No replica can answer now.")
_SAYS_NOTHING = frozenset({"Successful Response", "The answer.", *_SAID_ABOVE, *(one.phrase for one in HTTPStatus)})
_PROMPT = "| [a prompt](#naming-a-prompt) | {needed} |  |"
_IN_ITS_PLACE = ("chunks", "node")


def http_api_page(written_by_hand: str, schema: dict[str, Any]) -> str:
    """The page as it has to be, below a head that is kept as it is. `schema`: `app.openai.openapi_schema.describe`."""
    return "\n".join([written_by_hand + MARKER, *_routes(schema)])


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` say whether it is up to date."""
    old = PAGE.read_text(encoding="utf-8")
    page = http_api_page(old.partition(MARKER)[0], _description())
    if arguments != ["--check"]:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if page == old:
        return 0
    print(f"{PAGE.relative_to(PROJECT_ROOT)} is not up to date; run `python -m app.document`.", file=sys.stderr)
    return 1


def _description() -> dict[str, Any]:
    """The server's OpenAPI description, with the default settings. Nothing behind the ingress is there."""
    settings = load_settings({})
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.update(engine_environment(settings), HF_HUB_OFFLINE="1")
    from app.gate.auth import METRICS, OPEN_PATHS
    from app.ingress import create_app, frontend_config
    from app.openai.openapi_schema import describe

    nothing = cast(Any, None)
    backend = Backend(nothing, nothing, nothing)
    secret = ServerSecret(bytes(SECRET_BYTES))
    app = create_app(settings, frontend_config(engine_args(settings)), backend, bytes(32), secret, loopback=True)
    return describe(app, OPEN_PATHS - {METRICS})


def _routes(schema: dict[str, Any]) -> Iterator[str]:
    from app.control.prompt_param import PromptParam
    from app.openai.openapi_schema import routes

    left = routes(schema)
    for title, prefixes in _GROUPS:
        yield f"## {title}\n"
        for route in [one for one in left if one.path.startswith(prefixes)]:
            left.remove(route)
            yield f"### `{route.method} {route.path}`\n\n{fill(_flowing(route.text), 118)}\n"
            yield from _fields(route.fields, PromptParam.model_fields)
            answers = [
                f"`{code}`: {_flowing(text)}" for code, text in route.answers.items() if text not in _SAYS_NOTHING
            ]
            if answers:
                yield f"Answers {' '.join(answers)}\n"


def _fields(fields: Sequence[RouteField], of_a_prompt: Container[str]) -> Iterator[str]:
    """A table of a route's fields; where they name a prompt, that is one row. None of what vLLM explains."""
    own = [field for field in fields if field.name not in of_a_prompt]
    names_prompt = len(fields) - len(own) > 1
    if len(own) > MOST_EXPLAINED_FIELDS:
        yield "Takes vLLM's fields: `/docs` of a running server explains each.\n"
    elif fields:
        yield "| field | value | meaning |\n|---|---|---|"
        if names_prompt:
            other = next((field.name for field in own if field.name in _IN_ITS_PLACE), None)
            yield _PROMPT.format(needed=f"or `{other}`" if other else "required")
        for field in own if names_prompt else fields:
            needed = ", required" if field.required else ""
            yield f"| `{field.name}` | {field.allowed}{needed} | {_flowing(field.text)} |"
        yield ""


def _flowing(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
