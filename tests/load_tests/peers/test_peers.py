import importlib.util
import json
import socket
import subprocess
import sys

import pytest

from configs.model_folder import PROJECT_ROOT
from configs.settings import SettingsError
from load_tests.harness.patience import patience
from load_tests.peers import plain_serve, serve_llm
from load_tests.peers.engine import Offload, Peer, engine_arguments, kv_block_bytes, peer_environment
from load_tests.peers.serving import require_free

pytestmark = pytest.mark.usefixtures("each_processor")


@pytest.fixture
def folder(tmp_path):
    config = {
        "model_type": "qwen2",
        "max_position_embeddings": 4096,
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dtype": "bfloat16",
    }
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def settings(folder):
    return Peer(str(folder), 8001, 2, 64, 1024).settings()


def test_a_peer_has_the_engine_that_crosskv_would_have(settings):
    arguments = engine_arguments(settings)
    assert arguments["num_gpu_blocks_override"] == 64
    assert arguments["max_model_len"] == 1024
    for ours, theirs in (
        (settings.block_size_tokens, "block_size"),
        (settings.engine.max_num_seqs, "max_num_seqs"),
        (settings.max_num_batched_tokens, "max_num_batched_tokens"),
        (settings.engine.enforce_eager, "enforce_eager"),
    ):
        assert arguments[theirs] == ours


def test_a_peer_caches_prefixes_and_says_so(settings):
    arguments = engine_arguments(settings)
    assert arguments["enable_prefix_caching"] is True
    assert arguments["enable_prompt_tokens_details"] is True


def test_the_kv_budget_is_that_of_the_blocks(settings, each_processor):
    per_value = {"float32": 4, "bfloat16": 2}[each_processor]
    assert kv_block_bytes(settings) == 3 * 2 * 2 * 32 * per_value * 32  # layers, K and V, heads, head size, tokens
    assert engine_arguments(settings)["kv_cache_memory_bytes"] == 64 * kv_block_bytes(settings)


def test_a_peers_engine_runs_as_vllm_starts_it_by_default(settings):
    environment = peer_environment(settings)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_every_argument_is_one_that_vllm_knows(settings):
    from configs.engine_arguments import engine_argument_names

    unknown = set(engine_arguments(settings)) - engine_argument_names()
    assert unknown == {"enable_prompt_tokens_details"}  # an argument of its HTTP front


def test_serve_llm_gets_cpu_bundles_and_streams_every_token_at_once(settings):
    config = serve_llm.llm_config(settings)
    assert config["placement_group_config"] == {"bundle_per_worker": {"CPU": 1}}
    assert config["experimental_configs"] == {"stream_batching_interval_ms": 0}
    assert config["deployment_config"] == {"num_replicas": 2}
    assert config["model_loading_config"] == {"model_id": "tiny", "model_source": settings.model_source}


def test_serve_llm_gets_gpu_bundles_where_there_are_gpus(settings, monkeypatch):
    monkeypatch.setattr("configs.machine.accelerator", lambda: "cuda")
    assert serve_llm.llm_config(settings)["placement_group_config"] == {"bundle_per_worker": {"CPU": 1, "GPU": 1}}


@pytest.mark.parametrize(
    ("connector", "name", "extra", "environment"),
    [
        ("offloading", "OffloadingConnector", {"cpu_bytes_to_use": 3 << 29}, {}),
        ("lmcache", "LMCacheConnectorV1", {}, {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "1.5"}),
    ],
)
def test_an_offload_is_refused_on_cpu_and_given_its_memory_on_cuda(
    connector, name, extra, environment, settings, monkeypatch
):
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    offload = Offload(connector, 1.5)
    with pytest.raises(SettingsError, match=f"{name} refuses vLLM's CPU backend"):
        engine_arguments(settings, offload)
    monkeypatch.setattr("configs.machine.accelerator", lambda: "cuda")
    transfer = KVTransferConfig(**engine_arguments(settings, offload)["kv_transfer_config"])
    assert transfer.kv_connector_extra_config == extra
    assert offload.environment() == environment
    assert KVConnectorFactory.get_connector_class(transfer).__name__ == name


def test_a_port_in_use_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port {port} cannot be listened on .* choose another"):
            require_free(port)


@pytest.mark.parametrize("peer", [plain_serve, serve_llm])
def test_a_model_that_does_not_fit_the_pool_ends_a_peer_with_one_sentence(peer, folder, capsys):
    import typer

    with pytest.raises(typer.Exit) as ended:
        peer.main(folder, 8001, replicas=2, device_blocks=4, max_model_len=4096)
    assert ended.value.exit_code == 2
    assert "do not hold one request" in capsys.readouterr().err


def test_packages_that_ray_serve_llm_lacks_are_named(folder, capsys, monkeypatch):
    import typer

    monkeypatch.setattr(serve_llm, "EXTRA_PACKAGES", ("pandas", "no_such_package"))
    with pytest.raises(typer.Exit):
        serve_llm.main(folder, 8001)
    assert "needs no_such_package; install requirements/bench.txt" in capsys.readouterr().err


def test_what_one_peer_alone_imports_lies_where_only_that_peer_and_its_processes_find_it(tmp_path, monkeypatch):
    """Ray imports pandas and pyarrow in each process of any server that finds them."""
    (tmp_path / "one_peers_own.py").touch()
    monkeypatch.setattr(serve_llm, "EXTRA_FOLDER", tmp_path)
    monkeypatch.setattr(serve_llm, "EXTRA_PACKAGES", ("one_peers_own", "no_such_package"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", str(PROJECT_ROOT))
    find = [sys.executable, "-c", "import configs, one_peers_own"]
    assert serve_llm.missing_packages() == ["no_such_package"]
    assert (
        subprocess.run(
            find, cwd=tmp_path.parent, stderr=subprocess.DEVNULL, check=False, timeout=patience(60)
        ).returncode
        == 1
    )

    serve_llm.let_find_them()
    subprocess.run(find, cwd=tmp_path.parent, check=True, timeout=patience(60))
    found = importlib.util.find_spec("one_peers_own")
    assert found is not None
    assert found.origin == str(tmp_path / "one_peers_own.py")
