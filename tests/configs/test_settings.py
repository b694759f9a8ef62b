"""The settings tree: what it accepts, and the one sentence with which it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from configs import machine
from configs.model_folder import PROJECT_ROOT, own_max_tokens
from configs.settings import Settings, SettingsError, load_settings

pytestmark = pytest.mark.usefixtures("each_processor")

GIB = 1024**3

KEYS = {"api_keys": {"key": "alice"}}


@pytest.fixture(autouse=True)
def _a_known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: 8 * GIB)


@pytest.fixture
def load(model_folder: Path) -> Any:
    def load(**args: Any) -> Settings:
        return load_settings({"model": str(model_folder), **args})

    return load


@pytest.mark.parametrize(
    ("args", "names", "works"),
    [
        ({"replica": 3}, "replica", "replicas"),
        ({"kv": {"segment_token": 256}}, "kv.segment_token", "kv.segment_tokens"),
        ({"cpu_tier_bytes": "1GiB"}, "cpu_tier_bytes", "kv.cpu_tier_bytes"),
        ({"temperature": 1}, "temperature", "docs/guide/settings.md"),
        ({"replicas": 0}, "replicas", "greater than or equal to 1"),
        ({"roles": {"prefill": 2}}, "roles.prefill", "use less than 2, or set replicas to at least 3"),
        ({"replicas": 1, "roles": {"prefill": 1}}, "roles.prefill", "none of 1 replicas would decode"),
        ({"replicas": {"max": 4}, "roles": {"prefill": 1}}, "roles", "make replicas a number"),
        ({"roles": {"prefill": -1}}, "roles.prefill", "greater than or equal to 0"),
        ({"roles": {"prefill": 1}, "kv": {"enabled": False}}, "roles", "set roles.prefill to 0"),
        ({"roles": {"prefil": 1}}, "roles.prefil", "roles.prefill"),
        ({"routing": {"rebalance_streams": True}, "kv": {"enabled": False}}, "routing.rebalance_streams", "kv.enabled"),
        ({"replicas": "two"}, "replicas", "integer"),
        ({"replicas": True}, "replicas", "integer"),
        ({"replicas": 1.5}, "replicas", "integer"),
        ({"replicas": [1, 2]}, "replicas", "{min: 1, max: 4}"),
        ({"replicas": {}}, "replicas", "{min: 1, max: 4}"),
        ({"replicas": {"min": 2}}, "replicas", "{min: 1, max: 4}"),
        ({"replicas": {"min": 1, "most": 2}}, "replicas", "'most'"),
        ({"replicas": {"min": 0, "max": 2}}, "replicas", "min must be greater than or equal to 1"),
        ({"replicas": {"min": 3, "max": 2}}, "replicas", "min must be less than or equal to max, 2, not 3"),
        ({"replicas": {"min": 1, "max": "many"}}, "replicas", "max must be an integer"),
        ({"scaling": {"ttft_target_s": 0}}, "scaling.ttft_target_s", "greater than 0"),
        ({"scaling": {"upscale_delay_s": -1}}, "scaling.upscale_delay_s", "greater than or equal to 0"),
        ({"upscale_delay_s": 1}, "upscale_delay_s", "scaling.upscale_delay_s"),
        ({"dtype": "int8"}, "dtype", "'bfloat16'"),
        ({"http": {"cors_origins": ["*"]}}, "http.cors_origins", "http.api_keys"),
        ({"http": {"cors_origins": "https://a.org"}}, "http.cors_origins", "list"),
        ({"http": {"cors_origins": ["https://a.org/"]}}, "http.cors_origins", "without a path"),
        ({"http": {"cors_origins": ["null"]}}, "http.cors_origins", "https://chat.example.org"),
        ({"http": {"cors_origins": ["a.org"]}}, "http.cors_origins", "https://chat.example.org"),
        (
            {
                "engine": {
                    "tool_call_parser": "hermes",
                    "extra_args": {"structured_outputs_config": {"backend": "guidance"}},
                }
            },
            "engine",
            "xgrammar",
        ),
        ({"http": {"tool_call_parser": "hermes"}}, "http.tool_call_parser", "engine.tool_call_parser"),
        ({"kv": 3}, "kv", "dictionary"),
        ({"kv": {"segment_tokens": 100}}, "kv.segment_tokens", "128"),
        ({"kv": {"cpu_tier_bytes": "5GiB"}}, "kv.cpu_tier_bytes", "3072MiB"),
        ({"kv": {"cpu_tier_bytes": "5GiB", "redis_url": None}}, "kv.cpu_tier_bytes", "4096MiB"),
        ({"kv": {"cpu_tier_bytes": "5GiB", "redis_url": "redis://h"}}, "kv.cpu_tier_bytes", "4096MiB"),
        ({"kv": {"cpu_tier_bytes": "1GiB", "redis_bytes": "4GiB"}}, "kv.redis_bytes", "3072MiB"),
        ({"kv": {"cpu_tier_bytes": "5GiB", "redis_bytes": "4GiB"}}, "kv.cpu_tier_bytes", "2048MiB"),
        ({"kv": {"cpu_tier_bytes": 0}}, "kv.redis_url", "kv.redis_url to null"),
        ({"kv": {"redis_url": None, "redis_required": True}}, "kv.redis_required", "'embedded'"),
        ({"kv": {"redis_url": 6379}}, "kv.redis_url", "string"),
        ({"kv": {"redis_bytes": 0}}, "kv.redis_bytes", "greater than 0"),
        ({"kv": {"redis_folder": ""}}, "kv.redis_folder", "at least 1 character"),
        ({"kv": {"redis_namespace": "a/b"}}, "kv.redis_namespace", "'default'"),
        ({"kv": {"redis_namespace": "a" * 65}}, "kv.redis_namespace", "'default'"),
        ({"kv": {"redis_namespace": "a\n"}}, "kv.redis_namespace", "'default'"),
        ({"kv": {"redis_min_uses": 0.5}}, "kv.redis_min_uses", "greater than or equal to 1"),
        ({"kv": {"redis_expire_s": -1}}, "kv.redis_expire_s", "greater than or equal to 0"),
        ({"kv": {"prefetch_workers": 0}}, "kv.prefetch_workers", "greater than or equal to 1"),
        ({"kv": {"cpu_tier_bytes": "much"}}, "kv.cpu_tier_bytes", "1GiB"),
        ({"kv": {"lease_s": 1}}, "kv.lease_s", "2.0"),
        ({"engine": {"block_size_tokens": 16}}, "engine.block_size_tokens", "32"),
        ({"engine": {"device_blocks": 64}, "max_model_len": 4096}, "engine.device_blocks", "129"),
        ({"max_model_len": 8192}, "max_model_len", "4096"),
        ({"engine": {"extra_args": {"max_num_seqs": 4}}}, "engine.extra_args", "engine.max_num_seqs"),
        ({"engine": {"extra_args": {"max_loras_": 4}}}, "engine.extra_args", "max_loras"),
        ({"model": "models/none"}, "model", "Hugging Face id"),
        ({"model": "a/b/c"}, "model", "config.json"),
        ({"chat_template": "none.jinja"}, "chat_template", "Jinja"),
        ({"http": {"api_keys": {"": "tenant"}}}, "http.api_keys", "some-key"),
        ({"kv": {"eviction_policy": ""}}, "kv.eviction_policy", "1"),
        ({"kv": {"pin_budget_bytes": "-1"}}, "kv.pin_budget_bytes", "1GiB"),
    ],
)
def test_a_wrong_setting_is_one_sentence_that_names_it_and_what_works(
    load: Any, args: dict[str, Any], names: str, works: str
) -> None:
    with pytest.raises(SettingsError) as error:
        load(**args)
    sentence = str(error.value)
    assert sentence.startswith(f"{names}: ")
    assert works in sentence
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))


def test_the_advice_about_device_blocks_works(load: Any) -> None:
    with pytest.raises(SettingsError, match="at least 129, or lower max_model_len to 2016"):
        load(engine={"device_blocks": 64}, max_model_len=4096)
    assert load(engine={"device_blocks": 129}, max_model_len=4096)
    assert load(engine={"device_blocks": 64}, max_model_len=2016)


def test_without_max_model_len_the_models_own_limit_is_shortened_to_the_pool(load: Any) -> None:
    assert load(engine={"device_blocks": 65}).longest_request_tokens(131_072) == 64 * 32
    assert load(engine={"device_blocks": 65}).longest_request_tokens(1024) == 1024
    assert load(max_model_len=512).longest_request_tokens(131_072) == 512


def test_defaults_follow_the_machine(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = load()
    assert (on_cpu.block_size_tokens, on_cpu.blocks_per_segment, on_cpu.device_blocks) == (32, 8, 256)
    assert (on_cpu.max_num_batched_tokens, on_cpu.redis_codec) == (512, "raw")
    assert load(kv={"redis_url": "redis://elsewhere"}).redis_codec == "lossless"
    assert load(engine={"max_num_seqs": 600}).max_num_batched_tokens == 600
    assert load(engine={"max_num_seqs": 600, "max_num_batched_tokens": 700}).max_num_batched_tokens == 700
    monkeypatch.setattr(machine, "accelerator", lambda: "cuda")
    on_cuda = load()
    assert (on_cuda.block_size_tokens, on_cuda.blocks_per_segment, on_cuda.device_blocks) == (16, 16, None)
    assert on_cuda.max_num_batched_tokens == 2048
    assert on_cuda.redis_codec == "lossless"
    assert on_cuda.longest_request_tokens(131_072) == 131_072


def test_deadlines_follow_from_that_of_a_load(load: Any) -> None:
    """What operators had as defaults stays: a plan 0.25 s, a segment, an answer of Redis and a hand-over 0.5 s."""
    usual, slow = load(), load(kv={"load_deadline_s": 8})
    assert (usual.kv.plan_deadline_s, usual.kv.tier_deadline_s, usual.handover_deadline_s) == (0.25, 0.5, 0.5)
    assert (slow.kv.plan_deadline_s, slow.kv.tier_deadline_s, slow.handover_deadline_s) == (1.0, 2.0, 2.0)
    assert (usual.kv.redis_deadline_s, slow.kv.redis_deadline_s) == (0.5, 2.0)
    assert load(kv={"load_deadline_s": 1}).kv.redis_deadline_s == 0.5, "copies to Redis have as long as before"
    assert load(kv={"load_deadline_s": 0.2}).kv.redis_deadline_s == 0.2


def test_all_replicas_that_do_not_prefill_decode(load: Any) -> None:
    assert load(replicas=3).decode_replicas == 0
    assert load(replicas=3, roles={"prefill": 1}).decode_replicas == 2


def test_what_remembers_is_as_large_as_what_it_remembers_of(load: Any) -> None:
    assert (load().kv.max_ghosts, load().http.answer_lengths_bytes) == (100_000, 20 * 2**20)
    small = load(kv={"cpu_tier_bytes": "64MiB", "redis_bytes": "64MiB"}, http={"answer_memory_bytes": "16MiB"})
    assert 400 * small.kv.max_ghosts <= 128 * 2**20 / 50
    assert small.kv.max_ghosts > 6000
    assert load(kv={"cpu_tier_bytes": 0, "redis_url": None}).kv.max_ghosts == 0
    assert small.http.answer_lengths_bytes == 5 * 2**20


def test_sizes_take_units(load: Any) -> None:
    assert load(kv={"cpu_tier_bytes": "1.5GiB"}).kv.cpu_tier_bytes == 1.5 * GIB
    assert load(kv={"cpu_tier_bytes": 4096}).kv.cpu_tier_bytes == 4096


def test_layerwise_loads_have_one_setting(load: Any) -> None:
    with pytest.raises(
        SettingsError, match=r"kv\.load_paths: `layerwise` is `kv\.layerwise\.enabled`, which `off` turns"
    ):
        load(kv={"load_paths": ["blend", "layerwise"]})
    assert load(kv={"load_paths": ["blend"]}).kv.load_paths == ["blend"]


def test_words_that_yaml_takes_for_something_else_need_no_quotes(load: Any) -> None:
    found = load(**yaml.safe_load("kv: {sparse: off, layerwise: {enabled: on}}")).kv
    assert (found.sparse, found.layerwise.enabled) == ("off", "on")
    found = load(**yaml.safe_load("kv: {sparse: 75, layerwise: {enabled: off}}")).kv
    assert (found.sparse, found.layerwise.enabled) == ("75", "off")
    with pytest.raises(SettingsError, match=r"kv\.sparse"):
        load(kv={"sparse": 76})


def test_the_advice_about_budgets_works(load: Any) -> None:
    assert load(kv={"cpu_tier_bytes": "3GiB", "redis_bytes": "1GiB"})
    assert load(kv={"cpu_tier_bytes": "2GiB", "redis_bytes": "2GiB"})
    assert load(kv={"cpu_tier_bytes": "4GiB", "redis_url": "redis://elsewhere", "redis_bytes": "900GiB"})


def test_a_url_that_may_be_wrong_is_kept_for_the_running_server_to_judge(load: Any) -> None:
    for url in ("redis://nowhere:1/0", "rediss://h", "unix:///tmp/x.sock", "htp:/wrong", "Embedded", ""):
        settings = load(kv={"redis_url": url})
        assert settings.kv.redis_url == url
        assert not settings.kv.redis_embedded
    assert load().kv.redis_embedded
    assert load(kv={"redis_url": None, "cpu_tier_bytes": 0}).kv.redis_url is None


@pytest.mark.parametrize(
    "args",
    [
        {"kv": {"redis_url": ["redis://:hunter2@h"]}},
        {"kv": {"redis_url": {"hunter2": 1}}},
        {"kv": {"redis_url": "redis://:hunter2@h", "cpu_tier_bytes": 0}},
        {"kv": {"redis_url": "redis://:hunter2@h", "lease_s": 1}},
        {"kv": "redis_url=redis://:a'hunter2@h"},
        {"kv": {"redis_namespace": "REDISS://:hunter2@h"}},
        {"http": {"api_keys": {"hunter2": 5}}},
        {"http": {"api_keys": ["hunter2"]}},
    ],
    ids=str,
)
def test_no_secret_is_in_a_sentence(load: Any, args: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as error:
        load(**args)
    assert "hunter2" not in str(error.value)


def test_pydantics_own_message_shows_no_redis_url_either(load: Any) -> None:
    with pytest.raises(ValidationError) as error:
        Settings.model_validate({"kv": {"redis_url": ["redis://:hunter2@h"]}})
    assert "hunter2" not in str(error.value)


def test_the_settings_print_without_the_redis_url(load: Any) -> None:
    assert "hunter2" not in repr(load(kv={"redis_url": "redis://:hunter2@h"}))


def test_the_redis_folder_is_an_absolute_path_below_the_project(load: Any) -> None:
    assert load().kv.redis_folder_path == PROJECT_ROOT / ".crosskv" / "redis"
    assert load(kv={"redis_folder": "/data/redis"}).kv.redis_folder_path == Path("/data/redis")
    assert load(kv={"redis_folder": "~/redis"}).kv.redis_folder_path == Path.home() / "redis"


def test_a_tier_too_large_is_no_matter_while_kv_sharing_is_off(load: Any) -> None:
    assert not load(kv={"enabled": False, "cpu_tier_bytes": "100GiB"}).kv.enabled


def test_a_folder_is_found_from_the_project_and_named_by_its_last_part(model_folder: Path) -> None:
    settings = load_settings({"model": str(model_folder)})
    assert settings.model_source == str(model_folder)
    assert settings.model_name == model_folder.name
    assert load_settings({"model": "Qwen/Qwen3-8B"}).model_source == "Qwen/Qwen3-8B"
    assert load_settings({"model": "Qwen/Qwen3-8B"}).model_name == "Qwen/Qwen3-8B"
    assert load_settings({"model": "Qwen/Qwen3-8B", "served_model_name": "qwen"}).model_name == "qwen"


def test_a_model_without_weights_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("configs.model_folder.PROJECT_ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="make demo-model"):
        load_settings({"model": "models/demo"})


def test_settings_do_not_change_once_loaded(load: Any) -> None:
    with pytest.raises(ValidationError):
        load().replicas = 3


def test_the_projects_own_serve_config_is_valid() -> None:
    config = yaml.safe_load((PROJECT_ROOT / "serve_config.yaml").read_text())
    (application,) = config["applications"]
    assert load_settings(application["args"]).replicas == 2
    assert application["import_path"] == "app.builder:build"


@pytest.mark.parametrize("native", ["bfloat16", "float32"])
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_auto_is_what_the_processor_computes_and_on_cuda_vllms_choice(
    load: Any, monkeypatch: pytest.MonkeyPatch, native: Any, accelerator: Any
) -> None:
    monkeypatch.setattr(machine, "cpu_dtype", lambda: native)
    monkeypatch.setattr(machine, "accelerator", lambda: accelerator)
    settings = load()
    assert settings.engine_dtype == (native if accelerator == "cpu" else "auto")
    assert settings.engine_dtype in settings.dtype_said
    assert "dtype: auto" in settings.dtype_said
    named = load(dtype="float16")
    assert (named.engine_dtype, named.dtype_said) == ("float16", "float16")


@pytest.mark.parametrize(
    ("config", "is_quantized"),
    [
        ('{"quantization_config": {"quant_method": "awq"}}', True),
        ('{"text_config": {"quantization_config": {"quant_method": "awq"}}}', True),
        ('{"text_config": {}, "quantization_config": {"quant_method": "awq"}}', True),
        ('{"text_config": null, "quantization_config": null}', False),
        ("{}", False),
    ],
)
def test_a_quantized_models_type_is_left_to_vllm(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: str, is_quantized: bool
) -> None:
    (tmp_path / "config.json").write_text(config)
    settings = load_settings({"model": str(tmp_path), "max_model_len": 64})
    assert (settings.engine_dtype == "auto") == is_quantized
    assert own_max_tokens(tmp_path) is None


@pytest.mark.parametrize(("accelerator", "default"), [("cpu", "thread"), ("cuda", "process")])
def test_where_the_engine_computes_is_a_choice_of_two(
    accelerator: str, default: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "accelerator", lambda: accelerator)
    assert load_settings({}).engine_process == default
    assert [load_settings({"engine": {"process": mode}}).engine_process for mode in ("thread", "process")] == [
        "thread",
        "process",
    ]
    with pytest.raises(SettingsError, match=r"engine\.process"):
        load_settings({"engine": {"process": "fork"}})


def test_ranks_are_of_a_model_on_cpus_whose_engine_is_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "accelerator", lambda: "cpu")
    assert load_settings({"engine": {"threads": 2, "tensor_parallel_size": 3}}).replica_threads == 6
    with pytest.raises(SettingsError, match=r"engine\.process.*set it to thread"):
        load_settings({"engine": {"process": "process", "tensor_parallel_size": 2}})
    monkeypatch.setattr(machine, "accelerator", lambda: "cuda")
    with pytest.raises(SettingsError, match=r"engine\.tensor_parallel_size.*raise replicas"):
        load_settings({"engine": {"process": "thread", "tensor_parallel_size": 2}})


@pytest.mark.parametrize(
    ("replicas", "least", "most"),
    [(3, 3, 3), ("3", 3, 3), ({"min": 1, "max": 4}, 1, 4), ({"max": 4}, 1, 4), ({"min": 2, "max": 2}, 2, 2)],
)
def test_replicas_are_a_number_or_bounds(load: Any, replicas: Any, least: int, most: int) -> None:
    settings = load(replicas=replicas)
    assert (settings.min_replicas, settings.max_replicas, settings.scales) == (least, most, most > least)
