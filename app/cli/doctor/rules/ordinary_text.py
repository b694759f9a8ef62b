"""What prompts are full of: a page to try separators on. Prose, a list, code, a table, JSON, mail; each kind once."""

from __future__ import annotations

from collections.abc import Sequence

PAGE = """# Report

The harbour was closed for three days. "Nobody was hurt," said the mayor; ships waited outside (some of them since
Monday). Costs: about 5 % more than last year - see below.

## Details

### More

- Document 1: the first part, as it was sent
- Document 2: the second part
* Note: this is *not* final
1. Anna lives in Oslo.
2. Ben is a baker.

| name | value |
|---|---|
| ships | 12 |

---

```python
def load(path: str) -> dict:
    # Read the file ## and nothing else
    return {"path": path, "lines": [line for line in open(path)]}
```

{"title": "Harbour", "text": "It was closed.", "tags": ["sea", "news"]}
<p>Text: <b>bold</b> &amp; more</p>
***
=====
From: anna@example.org
Subject: Re: harbour
> quoted line

Question: What happened?
Answer: The harbour was closed.
Context: none
User: Hello!
Assistant: Hello, how can I help?
"""


def times_in_ordinary_text(separator: str) -> int:
    """How often it stands in that page, whatever its case; blanks around it count, for they are part of it."""
    return PAGE.lower().count(separator.lower())


def times_in_tokens(separator: Sequence[object], page: Sequence[int]) -> int:
    """How often these token ids stand in `page`, which is `PAGE` as a model's tokens."""
    size, wanted = len(separator), list(separator)
    return sum(list(page[at : at + size]) == wanted for at in range(len(page) - size + 1)) if size else 0
