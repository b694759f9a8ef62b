"""Chat templates and tokenizers as the field has them, made on this machine: which text the next turn shows the model.

Each template is of the form of the one that it is named after, in few lines. `strips`: the reasoning before an answer
is left out of the history.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from configs.model_folder import DEMO_MODEL, PROJECT_ROOT
from load_tests.harness.conversations import text
from load_tests.harness.models import CHAT_TEMPLATE as CHATML
from load_tests.harness.models import VOCABULARY, train_tokenizer

LLAMA = (
    "{{- '<|im_start|>system\n\nBe brief.<|im_end|>' -}}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '<|endoftext|>\n\n' + (message.content or '') | trim + '<|im_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant<|endoftext|>\n\n' -}}{%- endif -%}"
)
"""Llama 3's: two special tokens begin a turn, and content is trimmed."""
THINKING = (
    "{%- for message in messages -%}"
    "{%- set content = message.content or '' -%}"
    "{%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
"""Qwen3's: reasoning is stripped from history."""
TOOLS = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}"
    "{%- for call in message.tool_calls or [] -%}"
    '{{- \'<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' -}}'
    "{{- call.arguments | tojson -}}{{- '}\n</tool_call>' -}}"
    "{%- endfor -%}{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
"""Hermes' and Qwen's: a tool call is JSON between two marks."""


@dataclass(frozen=True)
class Model:
    """A tokenizer with a template."""

    name: str
    tokenizer: Any
    template: str
    words: tuple[str, ...]
    """What it says."""
    lead: str = ""
    """What its answers begin with."""

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer`."""
        return self.tokenizer.backend_tokenizer

    def render(self, messages: list[dict[str, Any]]) -> list[int]:
        """The prompt's tokens, as the server renders and cuts them."""
        text = self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, tokenize=False, add_generation_prompt=True
        )
        return list(self.backend.encode(text, add_special_tokens=False).ids)


@cache
def _bpe() -> Any:
    return train_tokenizer(VOCABULARY)


@cache
def _demo() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PROJECT_ROOT / DEMO_MODEL)


def models() -> list[Model]:
    """The demo model's tokenizer on what it was trained to say; a BPE of 8,192 tokens on what it was trained on."""
    from pydoc_data.topics import topics

    demo, bpe = _demo(), _bpe()
    reference = tuple("\n".join(topics[name] for name in sorted(topics)).split(" "))
    return [
        Model("demo", demo, demo.chat_template, tuple(text(Random(1), 40_000).split(" ")), lead=" "),
        *(
            Model(name, bpe, template, reference)
            for name, template in (("chatml", CHATML), ("llama", LLAMA), ("thinking", THINKING), ("tools", TOOLS))
        ),
    ]


def tool_call(name: str, arguments: dict[str, Any], spaced: bool) -> str:
    """As a model writes it: with the template's separators, or without spaces."""
    separators = (", ", ": ") if spaced else (",", ":")
    written = json.dumps({"name": name, "arguments": arguments}, separators=separators)
    return f"<tool_call>\n{written}\n</tool_call>"
