"""Plain vLLM behind Ray Serve's default router: `python -m load_tests.peers.plain_serve --model FOLDER --port 8001`

Each replica is vLLM's own OpenAI server with its own prefix cache; Serve's HTTP proxy chooses between two of them by
the length of their queues.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from configs.settings import Settings, SettingsError
from load_tests.peers.engine import Connector, Dtype, Offload, Peer, engine_arguments, peer_environment
from load_tests.peers.serving import serve_until_signal


def application(settings: Settings, arguments: dict[str, Any], environment: dict[str, str]) -> Any:
    """The Serve application: one deployment, the HTTP proxy's target itself."""
    from ray import serve

    from load_tests.peers.plain_replica import PlainReplica

    served = {"model": settings.model_source, "served_model_name": [settings.model_name], **arguments}
    deployment: Any = serve.deployment(
        serve.ingress()(PlainReplica),
        name="plain",
        num_replicas=settings.max_replicas,
        max_ongoing_requests=settings.http.max_ongoing_requests,  # Serve's default, 5, would starve the engines
        ray_actor_options={"num_cpus": 1, "runtime_env": {"env_vars": environment}}
        | ({"num_gpus": 1} if "kv_cache_memory_bytes" not in arguments else {}),
    )
    return deployment.bind(served)


def main(
    model: Annotated[Path, typer.Option(help="A model folder.")],
    port: Annotated[int, typer.Option(help="HTTP port.")],
    replicas: Annotated[int, typer.Option(min=1)] = 2,
    device_blocks: Annotated[int, typer.Option(min=2, help="KV blocks per replica.")] = 256,
    max_model_len: Annotated[int, typer.Option(min=1, help="Tokens of prompt and answer together.")] = 4096,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and KV.")] = "auto",
    connector: Annotated[Connector | None, typer.Option(help="Keep evicted KV in host memory (CUDA only).")] = None,
    offload_gib: Annotated[float, typer.Option(help="That memory, per replica.")] = 1.0,
    metrics_port: Annotated[int | None, typer.Option(help="Where Ray shows its metrics.")] = None,
) -> None:
    """Serve in the foreground until Ctrl-C."""
    peer = Peer(str(model), port, replicas, device_blocks, max_model_len, dtype)
    try:
        settings = peer.settings()
        offload = Offload(connector, offload_gib) if connector is not None else None
        arguments = engine_arguments(settings, offload)
        environment = {**peer_environment(settings), **(offload.environment() if offload is not None else {})}
        serve_until_signal(peer, settings, lambda: application(settings, arguments, environment), metrics_port)
    except SettingsError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
