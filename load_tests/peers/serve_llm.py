"""Ray Serve LLM with prefix-aware routing: `python -m load_tests.peers.serve_llm --model FOLDER --port 8001`

`ray.serve.llm.build_openai_app` with PrefixCacheAffinityRouter: the router keeps a tree of the texts that it sent, and
sends a prompt to the replica that has seen most of its beginning. Two of Ray's defaults are changed, both in its favour
on a machine with few cores: one ingress replica instead of two, and no batching of streamed tokens, which would
hold the first one back for up to 50 ms.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from configs import machine
from configs.settings import Settings, SettingsError
from load_tests.peers.engine import Dtype, Peer, engine_arguments, peer_environment
from load_tests.peers.serving import serve_until_signal

EXTRA_PACKAGES = ("pandas", "pyarrow")
"""What `ray.serve.llm` imports beyond crosskv's own requirements."""
EXTRA_FOLDER = Path(sys.prefix) / "peer"
"""Where `requirements/install.sh` puts them. Ray would import them in each process of any server that finds them."""


def missing_packages() -> list[str]:
    """Those of `EXTRA_PACKAGES` that are not installed."""
    places = [*sys.path, str(EXTRA_FOLDER)]
    return [name for name in EXTRA_PACKAGES if importlib.machinery.PathFinder.find_spec(name, places) is None]


def let_find_them() -> None:
    """Add `EXTRA_FOLDER` to what this process and those that it starts import from, behind all else."""
    sys.path.append(str(EXTRA_FOLDER))
    named = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{named}{os.pathsep}{EXTRA_FOLDER}" if named else str(EXTRA_FOLDER)


def llm_config(settings: Settings) -> dict[str, Any]:
    """What `ray.serve.llm.LLMConfig` is made of, except for the router's class."""
    bundle = {"CPU": 1} if machine.accelerator() == "cpu" else {"CPU": 1, "GPU": 1}
    return {
        "model_loading_config": {"model_id": settings.model_name, "model_source": settings.model_source},
        "engine_kwargs": engine_arguments(settings),
        "deployment_config": {"num_replicas": settings.max_replicas},
        "placement_group_config": {"bundle_per_worker": bundle},
        "runtime_env": {"env_vars": dict(peer_environment(settings))},
        "experimental_configs": {"stream_batching_interval_ms": 0},
    }


def application(settings: Settings) -> Any:
    """The Serve application of Ray Serve LLM."""
    from ray.serve.config import RequestRouterConfig
    from ray.serve.llm import LLMConfig, build_openai_app
    from ray.serve.llm.request_router import PrefixCacheAffinityRouter

    fields = llm_config(settings)
    router = RequestRouterConfig(
        request_router_class=PrefixCacheAffinityRouter  # type: ignore[arg-type]  # a validator's type hides the class's
    )
    fields["deployment_config"] = {**fields["deployment_config"], "request_router_config": router}
    return build_openai_app({"llm_configs": [LLMConfig(**fields)], "ingress_deployment_config": {"num_replicas": 1}})


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")],
    port: Annotated[int, typer.Option(help="HTTP port.")],
    replicas: Annotated[int, typer.Option(min=1)] = 2,
    device_blocks: Annotated[int, typer.Option(min=2, help="KV blocks per replica.")] = 256,
    max_model_len: Annotated[int, typer.Option(min=1, help="Tokens of prompt and answer together.")] = 4096,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and KV.")] = "auto",
    metrics_port: Annotated[int | None, typer.Option(help="Where Ray shows its metrics.")] = None,
) -> None:
    """Serve in the foreground until Ctrl-C."""
    peer = Peer(str(model), port, replicas, device_blocks, max_model_len, dtype)
    try:
        missing = missing_packages()
        if missing:
            raise SettingsError(f"Ray Serve LLM needs {' and '.join(missing)}; install requirements/bench.txt.")
        settings = peer.settings()
        let_find_them()
        serve_until_signal(peer, settings, lambda: application(settings), metrics_port)
    except SettingsError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
