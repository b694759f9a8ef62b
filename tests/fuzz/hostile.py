"""Requests that no schema describes: values that break parsers, validators and templates, and mutated bytes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

TOKENS = list(range(5, 69))
MESSAGES = [{"role": "user", "content": "Where is the red ball?"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "demo", "messages": MESSAGES, "max_tokens": 3},
    "/v1/completions": {"model": "demo", "prompt": "The red ball", "max_tokens": 3},
    "/v1/responses": {"model": "demo", "input": MESSAGES, "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"model": "demo", "input": MESSAGES},
    "/v1/messages": {"model": "demo", "messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "demo", "messages": MESSAGES},
    "/tokenize": {"prompt": "The red ball"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/api/v1/kv/clear": {"tiers": ["cpu"]},
    "/api/v1/kv/pin": {"tokens": TOKENS},
    "/api/v1/kv/unpin": {"tokens": TOKENS},
    "/api/v1/kv/prefetch": {"tokens": TOKENS, "replica": 0},
    "/api/v1/kv/fill": {"chunks": [TOKENS]},
    "/api/v1/kv/move": {"tokens": TOKENS, "source": 0, "target": 1},
    "/api/v1/requests/{request_id}/move": {"replica": 1},
    "/api/v1/kv/evict": {"tokens": TOKENS, "dry_run": True},
    "/api/v1/kv/compress": {"tokens": TOKENS},
    "/api/v1/kv/diverge": {"first": {"tokens": TOKENS}, "second": {"tokens": TOKENS[:-1]}},
}
"""A valid body of each route that takes one."""

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 128, 129, 2**31, 2**63, -(2**63) - 1, 10**300, 0.5, -0.0, 1e308, 5e-324,
    "", " ", "\0", "a" * 10_000, "\U0010ffff", "e\u0301" * 50, "\u202e", "<|end|>", "<|assistant|>", "{{ 7*7 }}",
    "{% for x in range(10**9) %}x{% endfor %}", "../../etc/passwd", "http://127.0.0.1:9/", "file:///etc/passwd",
    "data:image/png;base64,AAAA", "NaN", "1e400", "a\r\nx: y",
    [], [[]], [None], [""], ["\0"], [0] * 600, [2**70], [[5, 6], "a"], [{}], [[[[]]]], [-1], [1.5], [True],
    {}, {"": ""}, {"a": {"a": {"a": {}}}}, {"type": "json_object"}, {"type": "text"}, {"include_usage": True},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"patternProperties": {"((": {}}}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}},
    {"type": "json_schema"}, {"type": "json_schema", "json_schema": None},
    {"type": "structural_tag", "format": {}}, {"type": "structural_tag", "structures": [], "triggers": []},
    {"regex": "(a+)+$"}, {"regex": "\0"}, {"regex": ""}, {"json": {"type": "object"}}, {"grammar": "root ::= root"},
    {"grammar": "start: start"}, {"choice": ["", "a"]}, {"json_object": False}, {"structural_tag": "{}"},
    [{"type": "function", "function": {"name": "f"}}], [{"type": "function", "function": {"name": ""}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/nowhere"}, "strict": True}}],
    {"type": "function", "function": {"name": "g"}}, "auto", "required", "none",
    [{"role": "user", "content": None}], [{"role": "", "content": ""}], [{"role": "user", "content": []}],
    [{"role": "assistant", "tool_calls": [{}]}], [{"role": "tool", "content": "a", "tool_call_id": 5}],
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "user", "content": {"a": 1}}], [{"role": ["user"], "content": "a"}], ["a"], [5],
    {"fidelity": "tolerant"}, {"fidelity": []}, {"fidelity": "blended", "recompute_ratio": -0.0},
    {"fidelity": "blended", "chunks": ["\0", "a" * 300]}, {"fidelity": "blended", "chunks": [[5]]}, {"chunks": ["a"]},
    {"recompute_ratio": 10**300}, {"5": 1e308}, {"99999999": 1}, {"x": 1}, {"-1": 1},
    {"chat_template": "{{ 1/0 }}"}, {"tokenize": True}, {"return_dict": True}, {"add_generation_prompt": 5},
    [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}], [{"type": "reasoning"}],
    [{"type": "message", "role": "assistant", "content": []}], [{"type": "function_call", "name": "f"}],
    [{"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}],
    [{"type": "custom_tool_call", "call_id": "1"}], [{"type": "item_reference", "id": "a"}],
    [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}, 5]}]}],
    [{"role": "assistant", "content": [{"type": "tool_use", "input": {"a": 1}}, {"type": "thinking"}]}],
    [{"role": "system", "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}}]}],
    [{"type": "web_search"}], [{"type": "namespace", "name": "a", "tools": []}], [{"type": "custom", "name": "a"}],
    [{"name": "f", "input_schema": {}}], {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "disabled"},
    {"format": {"type": "json_schema", "name": "a", "schema": {"$ref": "#"}}}, {"effort": "low"},
    {"messages": []}, {"tools": 5}, {"crosskv_hints": "x"}, {"documents": [{}]},
]  # fmt: skip
FIELDS = [
    "kv_cache", "chat_template", "chat_template_kwargs", "documents", "tools", "tool_choice", "echo", "logprobs", "n",
    "top_logprobs", "prompt_logprobs", "stream", "stream_options", "truncate_prompt_tokens", "truncation_side",
    "priority", "vllm_xargs", "add_special_tokens", "response_format", "structured_outputs", "stop", "logit_bias",
    "cache_salt", "request_id", "repetition_detection", "thinking_token_budget", "prompt_embeds", "suffix",
    "continue_final_message", "add_generation_prompt", "mm_processor_kwargs", "media_io_kwargs", "reasoning_effort",
    "include_reasoning", "parallel_tool_calls", "bad_words", "allowed_token_ids", "min_tokens", "stop_token_ids",
    "input", "instructions", "previous_response_id", "background", "store", "conversation", "prompt", "text",
    "truncation", "reasoning", "include", "max_tool_calls", "enable_response_messages", "previous_input_messages",
    "system", "stop_sequences", "thinking", "output_config", "metadata",
    "modalities", "audio", "web_search_options", "functions", "function_call", "best_of", "guided_json",
    "return_tokens_as_token_ids", "return_token_ids", "kv_transfer_params", "use_beam_search", "seed", "temperature",
]  # fmt: skip
PLAUSIBLE: dict[str, list[Any]] = {
    "n": [1, 2, 16], "logprobs": [0, 1, 20, True], "top_logprobs": [0, 1, 20], "prompt_logprobs": [0, 1, -1],
    "max_tokens": [1, 2, 400], "min_tokens": [0, 1, 3], "temperature": [0, 1e-9, 0.9, 2], "top_p": [1e-9, 0.5, 1],
    "top_k": [-1, 0, 1, 1147, 10**9, 2**31, 2**63], "min_p": [0, 1e-9, 1], "repetition_penalty": [1e-9, 1, 1e30, 1e308],
    "presence_penalty": [-2, 2], "frequency_penalty": [-2, 2], "seed": [0, -1, 2**63 - 1, -(2**63)],
    "logit_bias": [{"5": 100}, {"5": -100, "6": 1e308}, {"1147": 1}, {}], "ignore_eos": [True], "echo": [True],
    "allowed_token_ids": [[5], [5] * 600, [0, 1147]], "bad_words": [["a"], ["the red", "ball"]], "stop": [["a"], "o"],
    "stop_token_ids": [[5], [2**31], [-1], [2**63]], "stream": [True], "stream_options": [{"include_usage": True}],
    "truncate_prompt_tokens": [-1, 0, 1, 5], "truncation_side": ["left", "right"], "priority": [0, 1, -(2**63)],
    "vllm_xargs": [{"a": 1}, {"": [1, "a"]}], "logprob_token_ids": [[5], [5, 6], [2**40]], "return_token_ids": [True],
    "repetition_detection": [{"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2}, {}],
    "thinking_token_budget": [0, 5, -1], "stream_interval": [1, 100], "skip_special_tokens": [False],
    "response_format": [{"type": "json_object"}, {"type": "text"}], "include_stop_str_in_output": [True],
    "structured_outputs": [{"choice": ["a", "b"]}, {"regex": "[a-z]+"}, {"json_object": True}], "length_penalty": [0],
    "spaces_between_special_tokens": [False], "routed_experts_prompt_start": [0, 100], "return_token_offsets": [True],
    "return_tokens_as_token_ids": [True], "cache_salt": ["a"], "add_special_tokens": [False],
    "watermarking": [True, False], "use_beam_search": [False], "prompt": [[5], [[5, 6], [7]], ["a", "b"]],
    "kv_cache": [{"fidelity": "tolerant"}, {"fidelity": "blended", "recompute_ratio": 1, "chunks": ["The red ball"]}],
    "include_reasoning": [False], "reasoning_effort": ["low"],
    "add_generation_prompt": [False], "continue_final_message": [True], "request_id": ["same"], "user": ["u"],
}  # fmt: skip
"""Values of generation's fields that may well be taken: what they do together is seen at the engine's door."""
RAW = [
    b"", b"{", b"[]", b"null", b'"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"[" * 500, b'{"a":' * 500, b"9" * 5000, b"{}" * 2,
    b'{"tokens": [1e400]}', b'{"tokens": NaN}', b'{"model": "\\ud800"}', b'{"tokens":[1],"tokens":[2]}', b"{}\0",
]  # fmt: skip


def bodies(path: str, fields: list[str]) -> st.SearchStrategy[bytes]:
    """Bodies for a route whose schema names `fields`: a valid one with some fields replaced, or with mutated bytes."""
    base = BASES[path]
    names = st.sampled_from(sorted({*fields, *FIELDS, *base}) if path.startswith("/v1/") else sorted({*fields, *base}))
    replaced = st.dictionaries(names, st.sampled_from(VALUES), min_size=1, max_size=3).map(
        lambda changes: json.dumps({**base, **changes}).encode()
    )
    kinds = [replaced, replaced, replaced, _mutated(json.dumps(base).encode()), st.sampled_from(RAW)]
    if path.startswith("/v1/"):
        kinds += [plausible(path)] * 5
    return st.one_of(kinds)


def plausible(path: str) -> st.SearchStrategy[bytes]:
    """Bodies of a generation route that the front takes more often than not."""
    field = st.sampled_from(sorted(PLAUSIBLE)).flatmap(lambda name: st.tuples(st.just(name), _one_of(name)))
    return st.lists(field, min_size=1, max_size=5).map(lambda some: json.dumps({**BASES[path], **dict(some)}).encode())


def _one_of(name: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(PLAUSIBLE[name])


def _mutated(text: bytes) -> st.SearchStrategy[bytes]:
    places = st.integers(0, len(text))
    return st.builds(
        lambda start, length, by: text[:start] + by + text[start + length :],
        places,
        st.integers(0, 12),
        st.binary(max_size=8),
    )
