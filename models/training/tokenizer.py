"""The demo model's tokenizer and chat template.

Byte-level BPE without merges: a known word is one token, any other text falls to its bytes, so every string is
representable and decodes to itself.  The template is append-only: a conversation's rendering is a token prefix of the
same conversation's rendering one turn later, which is what lets the KV of an *answer* be reused.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from models.training import lexicon, phrasing

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT, DOC = "<|system|>", "<|user|>", "<|assistant|>", "<|doc|>"
SPECIAL_TOKENS: tuple[str, ...] = (PAD, BOS, END, SYSTEM, USER, ASSISTANT, DOC)

MAX_TOKENS = 4096

# Content that does not begin with white space gets one space, so that its first word is the same token as inside a
# sentence.  The model's answers begin with that space; a client that strips it gets it back here.
CHAT_TEMPLATE = """\
{%- macro body(text) -%}
{%- if text and text[0] not in ' \\n\\t\\r' -%}{{- ' ' -}}{%- endif -%}{{- text -}}
{%- endmacro -%}
{%- macro document(doc) -%}
{{- '<|doc|>' -}}
{%- if doc.title -%}{{- body(doc.title) -}}{{- '\\n' -}}{%- endif -%}
{{- body(doc.text if doc.text else (doc.content or '')) -}}
{%- endmacro -%}
{{- '<|bos|>' -}}
{%- set has_system = messages and messages[0].role in ['system', 'developer'] -%}
{%- if documents or has_system -%}
{{- '<|system|>' -}}
{%- if has_system -%}{{- body(messages[0].content or '') -}}{%- endif -%}
{%- for doc in documents or [] -%}{{- document(doc) -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and has_system) -%}
{%- if message.role == 'assistant' -%}{{- '<|assistant|>' -}}
{%- elif message.role in ['system', 'developer'] -%}{{- '<|system|>' -}}
{%- else -%}{{- '<|user|>' -}}
{%- endif -%}
{{- body(message.content or '') -}}{{- '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def _known_words() -> list[str]:
    """Whole-word tokens, a leading space included; those that can open a line also without it."""
    spaced: dict[str, None] = {}
    opening: dict[str, None] = {}
    texts = phrasing.all_phrases()
    texts += [*lexicon.NOTE_PREDICATES, *lexicon.NOTE_TIMES, *lexicon.NOTE_SUBJECTS, *lexicon.NOTE_ADJECTIVES]
    texts += lexicon.TITLES
    for text in texts:
        words = re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}|'s", " ", text))
        spaced.update(dict.fromkeys(words))
        if words and words[0][0].isupper():
            opening[words[0]] = None
    groups = (lexicon.NAMES, lexicon.CITIES, lexicon.JOBS, lexicon.INSTRUMENTS, lexicon.ANIMALS, lexicon.COLORS)
    for group in (*groups, lexicon.OBJECTS):
        spaced.update(dict.fromkeys(group))
    opening.update(dict.fromkeys(lexicon.NAMES))
    return ["'s", "'t", *(f"Ġ{word}" for word in spaced), *opening]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, from the word lists alone: the same lists give the same ids."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    seen = set(tokens)
    tokens += [word for word in _known_words() if word not in seen]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, DOC],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_TOKENS,
    )


def save_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (the template inside) into `folder`."""
    build_tokenizer().save_pretrained(folder, save_jinja_files=False)
