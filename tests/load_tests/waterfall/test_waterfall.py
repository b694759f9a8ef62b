"""The waterfall without a server: a client over a small socket server, prompts, tables, a picture."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from app.metrics.stages import STAGES as PRODUCT_STAGES
from load_tests.harness.answers import Answer
from load_tests.harness.client import ServerError
from load_tests.measuring.program import InputError
from load_tests.peers.engine import Peer
from load_tests.waterfall.measure import (
    DEVICE,
    LONG_TOKENS,
    QUESTION_TOKENS,
    REDIS,
    TINY,
    TINY_TOKENS,
    Found,
    documents,
    questions,
    require_answers,
    tiny,
)
from load_tests.waterfall.report import STAGES, as_json, draw, merged, peer_table, stage_table, ttft_ratio
from load_tests.waterfall.servers import commands
from load_tests.waterfall.wire import Connection
from load_tests.workloads import Words

WORDS = Words(lambda text: len(text.split()))
USAGE = {"prompt_tokens": 45, "completion_tokens": 16, "kv_cache": {"device": 0, "stages_ms": {"step": 3.0}}}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields}])


async def served(pieces: list[bytes], status: str = "200 OK", times: int = 1) -> list[Answer]:
    """What the client makes of a server that sends these chunks."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(times):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            asked.append(await reader.readexactly(length))
            writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
            for piece in [*pieces, b""]:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        connection = Connection("127.0.0.1", port)
        try:
            found = [await connection.ask("/v1/chat/completions", {"n": 1}, {}) for _ in range(times)]
        finally:
            connection.close()
    assert asked == [b'{"n": 1}'] * times
    return found


def test_the_first_text_is_timed_and_the_usage_is_read_however_the_stream_is_cut():
    whole = b"".join(
        [
            delta(role="assistant", content=""),
            delta(content="one"),
            delta(content=" two"),
            event(choices=[], usage=USAGE),
            b"data: [DONE]\n\n",
        ]
    )
    for size in (1, 7, 1000):
        pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
        for answer in asyncio.run(served(pieces, times=2)):
            assert 0 < answer.ttft_s <= answer.seconds
            assert answer.usage == USAGE


def test_a_token_without_text_counts_and_the_role_does_not():
    (answer,) = asyncio.run(served([delta(role="assistant", content=""), b"data: [DONE]\n\n"]))
    assert answer.ttft_s is None
    (answer,) = asyncio.run(served([delta(content=""), b"data: [DONE]\n\n"]))
    assert answer.ttft_s > 0.0


def test_another_status_is_one_sentence():
    with pytest.raises(ServerError, match="429"):
        asyncio.run(served([b"{}"], status="429 Too Many Requests"))


def test_lengths_are_drawn_and_equal_seeds_ask_the_same():
    asked = tiny(random.Random(1), WORDS, 40)
    lengths = {len(one.question.split()) for one in asked}
    assert len(lengths) > 10
    assert TINY_TOKENS[0] <= min(lengths) <= max(lengths) <= TINY_TOKENS[1]
    assert asked == tiny(random.Random(1), WORDS, 40)
    texts = documents(random.Random(2), WORDS, 5)
    assert all(LONG_TOKENS[0] <= len(one.split()) <= LONG_TOKENS[1] for one in texts)
    about = questions(random.Random(3), WORDS, texts)
    assert [one.document for one in about] == texts
    assert all(QUESTION_TOKENS[0] <= len(one.question.split()) <= QUESTION_TOKENS[1] for one in about)
    assert [message["role"] for message in about[0].body("m")["messages"]] == ["system", "user"]
    assert [message["role"] for message in asked[0].body("m")["messages"]] == ["user"]


def found(ttft_ms: float, count: int = 8, crosskv: bool = True) -> Found:
    usage = {"prompt_tokens": 45, "completion_tokens": 16}
    if crosskv:
        usage |= {"kv_cache": {"device": 0, "stages_ms": {"step": 3.0, "handle": 1.0}}}
    one = Found(busy_s=2.0, asked=count)
    for number in range(count):
        answer = Answer()
        answer.ttft_s, answer.seconds, answer.usage = (ttft_ms + number / 10) / 1e3, 0.1, usage
        one.answers.append(answer)
    return one


def test_what_no_stage_has_is_the_proxys():
    rows = found(10.0, 1).stages_ms()
    assert rows == [{"proxy": pytest.approx(6.0), "step": 3.0, "handle": 1.0}]
    assert found(10.0, 1, crosskv=False).stages_ms() == []


def test_the_tables_name_every_stage_and_every_arm_and_the_ratio_has_an_interval():
    ours = {(TINY, 1): found(10.0), (REDIS, 1): found(40.0), (TINY, 16): found(80.0)}
    text = stage_table(ours)
    assert all(f"`{stage}`" in text for stage in STAGES)
    assert "| **first token** | **10.35** / 10.66 | **40.35** / 40.66 | **80.35** / 80.67 |" in text
    assert text.splitlines()[0].startswith("| stage, ms | tiny prompts, 1 at a time | Redis hits, 1 at a time | tiny")
    runs = {"crosskv": [ours], "vllm": [{(TINY, 1): found(20.0, crosskv=False)}]}
    lines = peer_table(runs, "crosskv").splitlines()
    assert lines[3].startswith("| tiny prompts, 1 at a time | vllm | 20.4 / 20.35 / 20.66 | 0.51 (0.50")
    assert lines[3].endswith("| 4.0 | 1.00 |")
    assert "; one start) |" in lines[3]
    assert ttft_ratio([([1.0], [2.0, 2.0])]) == "0.50 (one start)"


def test_servers_that_differ_from_start_to_start_show_nothing_however_many_requests_they_answered():
    faster, slower = [8.0 + number / 1e3 for number in range(200)], [9.0 + number / 1e3 for number in range(200)]
    starts = [(faster, slower), (slower, faster), (faster, slower)]
    assert ttft_ratio(starts).endswith(", not shown)")
    assert not ttft_ratio([(faster, slower)] * 3).endswith("not shown)")


def test_the_stages_shown_are_those_of_the_product():
    assert STAGES[1:] == PRODUCT_STAGES


def test_alternations_are_put_together_and_json_holds_every_answer():
    whole = merged([{(DEVICE, 1): found(10.0)}, {(DEVICE, 1): found(20.0)}])
    assert whole[DEVICE, 1].requests_per_s == 4.0
    document = json.loads(json.dumps(as_json({"crosskv": whole}, "a machine")))
    (point,) = document["arms"]["crosskv"]
    assert len(point["ttft_s"]) == len(point["stages_ms"]) == 16


def test_the_picture_has_a_panel_for_each_concurrency(tmp_path: Path):
    draw({(TINY, 1): found(10.0), (DEVICE, 16): found(20.0)}, tmp_path / "waterfall.png")
    assert (tmp_path / "waterfall.png").read_bytes().startswith(b"\x89PNG")


def test_a_case_whose_prompts_came_from_elsewhere_is_an_error():
    with pytest.raises(ServerError, match="none of 3 prompts came from redis"):
        require_answers({(REDIS, 1): Found(asked=3, elsewhere=3)}, "alternation 1")


def test_every_arm_has_a_command_and_what_cannot_be_is_one_sentence(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_attention_heads": 4, "hidden_size": 256, "num_hidden_layers": 8, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    peer = Peer(str(folder), 1234, 1, 256, 4096, "float32")
    starts = commands(None, loads=True)
    assert set(starts) == {"crosskv", "serve-llm", "serve-llm-tuned", "vllm"}
    words = starts["vllm"](peer, tmp_path, 1)
    assert words[0] == "env"
    assert words[words.index("--port") :][:2] == ["--port", "1234"]
    assert "--enable-prefix-caching" in words
    starts["crosskv"](peer, tmp_path, 1)
    assert "load_or_recompute: load" in (tmp_path / "serve_config.yaml").read_text()
    commands(None, loads=False)["crosskv"](peer, tmp_path, 1)
    assert "load_or_recompute" not in (tmp_path / "serve_config.yaml").read_text()
    assert "RAY_SERVE_USE_GRPC_BY_DEFAULT=1" in starts["serve-llm-tuned"](peer, tmp_path, 1)
    with pytest.raises(InputError, match="one replica"):
        starts["vllm"](Peer(str(folder), 1234, 2, 256, 4096, "float32"), tmp_path, 1)
    with pytest.raises(InputError, match="no checkout"):
        commands(tmp_path, loads=True)
