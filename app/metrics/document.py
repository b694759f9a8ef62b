"""Writes docs/guide/metrics.md from the code: `python -m app.metrics.document`; with `--check` it only compares.

Loads the modules that count, vLLM among them: some five seconds, no weights, no Ray.
"""

from __future__ import annotations

import os
import re
import sys
from itertools import groupby

from app.metrics.catalogue import LABELS, Described, catalogue
from configs.model_folder import PROJECT_ROOT

PAGE = PROJECT_ROOT / "docs" / "guide" / "metrics.md"

_HEAD = """# Metrics

What `GET /metrics` shows of the project's own, in Prometheus' text format; vLLM's own metrics (`vllm:*`) stand next
to them, by replica. [Keys](keys.md#keys-and-tenants) says whose key opens it, and
[troubleshooting](troubleshooting.md#where-to-look-first) which to look at first. `python -m app.metrics.document`
writes this page from the code.

A name that ends in `_total` is a counter's: it begins at 0 again when the part that counts does. A histogram says so,
and has `_bucket`, `_sum` and `_count`. All others are gauges. A unit stands in the name, or in the sentence. What a
server has no use for (Redis, scaling, a scheduling policy) it does not show.
"""
_LABELS_HEAD = """## Labels

No label holds an id of a request, a prompt, or a name that a client chose.

| label | values |
|---|---|"""
_DOCS_PAGE = re.compile(r"\b(docs/[\w/]+\.md)\b")


def metrics_page() -> str:
    """docs/guide/metrics.md as it has to be."""
    parts = [_HEAD]
    for part, metrics in groupby(catalogue(), lambda one: one.part):
        rows = [_row(one) for one in sorted(metrics, key=lambda one: one.name)]
        parts.append("\n".join([f"## {part}\n", "| metric | means |", "|---|---|", *rows, ""]))
    parts.append("\n".join([_LABELS_HEAD, *(f"| `{label}` | {values} |" for label, values in LABELS.items()), ""]))
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` say whether it is up to date."""
    page = metrics_page()
    if arguments != ["--check"]:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE.relative_to(PROJECT_ROOT)} is not up to date; run `python -m app.metrics.document`.", file=sys.stderr)
    return 1


def _row(one: Described) -> str:
    labels = f"{{{','.join(sorted(one.labels))}}}" if one.labels else ""
    text = _DOCS_PAGE.sub(_link, one.text).replace("|", "\\|")
    return f"| `{one.name}{labels}` | {text}{' *Histogram.*' if one.type == 'histogram' else ''} |"


def _link(match: re.Match[str]) -> str:
    path = os.path.relpath(PROJECT_ROOT / match[1], PAGE.parent)
    return f"[{os.path.splitext(os.path.basename(path))[0]}]({path})"  # noqa: PTH119, PTH122 (a link, no file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
