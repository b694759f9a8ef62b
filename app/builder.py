"""`import_path` of serve_config.yaml: from the settings under `args:` to the Serve application.

Serve calls `build` in a short-lived process of the cluster; it must stay light (no vLLM, no torch), and what it raises
is what the user reads: one sentence from `configs.settings`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig
from ray.serve.deployment import Application

from app.checks.before_start import require_startable
from app.cluster_checks import check_cluster
from configs import machine
from configs.secret.handed_on import sealed, shown_secrets, with_secrets_file
from configs.settings import Settings, load_settings
from deployments.engine.engine_args import engine_environment
from deployments.manager.actor import KVManagerActor
from deployments.manager.config import manager_config, pin_shares, tenant_quotas
from deployments.protocol.manager_client import MANAGER_ACTOR
from deployments.protocol.secret_file import server_secret
from deployments.redis_tier.actor import RedisTier
from deployments.redis_tier.config import RedisTierConfig
from deployments.replica.replica import Replica
from deployments.replica.serve_process import SERVE_OPTIONS
from deployments.router.prefix_affinity import PrefixAffinityRouter, RouterOptions
from deployments.scaling.policy import replica_options
from kvmanager.routing.roles import RoleShares
from kvmanager.segments.server_secret import ServerSecret

logger = logging.getLogger(__name__)

REDIS_ACTOR = "redis_tier"
MANAGER_CONCURRENCY = 10_000
"""Calls that may wait inside the manager at once, long polls among them."""
DRAIN_POLL_S = 1.0


def build(args: Mapping[str, Any]) -> Application:
    """Build the application: ingress → router → replicas, and the KV-manager actor."""
    from app.serve_ingress import Ingress

    shown = args
    args = with_secrets_file(args)
    settings = load_settings(args)
    if secrets := shown_secrets(shown):
        logger.warning(
            "%s: Ray Serve has written these secrets to its log. Put them into a file that secrets_file names, or "
            "write keys as digests (docs/guide/keys.md)",
            ", ".join(secrets),
        )
    require_startable(settings)
    check_cluster(settings)
    logger.info("%s computes in %s", settings.model_name, settings.dtype_said)
    # Here, for all nodes: KV of two types, or of two kinds of processor, is not shared.
    chosen = {
        **args,
        "dtype": settings.engine_dtype,
        "kv": {**(args.get("kv") or {}), "processor": settings.kv.processor or settings.processor_here or None},
    }
    if adapters := settings.engine.lora_adapters:  # what their names mean must not change while the server runs
        pinned = {name: adapter.pinned().model_dump() for name, adapter in adapters.items()}
        chosen["engine"] = {**(args.get("engine") or {}), "lora_adapters": pinned}
    plain = sealed(chosen, settings.http.api_keys, settings.http.metrics_key)
    secret = server_secret(settings.kv.redis_folder_path)
    replica: Any = serve.deployment(
        Replica,
        name="Replica",
        **replica_options(settings),
        # The ingress bounds what is under way; a second, smaller bound here would only hide requests from the engines.
        max_ongoing_requests=settings.http.max_ongoing_requests,
        ray_actor_options=_replica_resources(settings),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixAffinityRouter,  # type: ignore[arg-type]  # a validator's type hides the class's
            request_router_kwargs={"options": RouterOptions.from_settings(settings).as_dict()},
        ),
        deployment_actors=[_manager(settings, secret), *_redis_tier(settings, secret)],
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        graceful_shutdown_timeout_s=settings.http.drain_s,
    )
    ingress: Any = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=1,
        # Everything is let in, so that the ingress itself can answer 429 in OpenAI's shape.
        max_ongoing_requests=1_000_000,
        ray_actor_options={"num_cpus": 0, "runtime_env": _environment(settings)},
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        graceful_shutdown_timeout_s=settings.http.drain_s,
    )
    return ingress.bind(plain, secret, replica.bind(plain))


def _environment(settings: Settings) -> dict[str, Any]:
    """Ray's `runtime_env` of the two deployments' processes."""
    return {"env_vars": {**engine_environment(settings), **SERVE_OPTIONS}}


def _replica_resources(settings: Settings) -> dict[str, Any]:
    resources: dict[str, Any] = {"runtime_env": _environment(settings)}
    if machine.accelerator() == "cuda":
        return {"num_cpus": 1, "num_gpus": 1, **resources}
    return {"num_cpus": settings.replica_threads, **resources}


def _manager(settings: Settings, secret: ServerSecret) -> DeploymentActorConfig:
    return DeploymentActorConfig(
        name=MANAGER_ACTOR,
        actor_class=ray.remote(KVManagerActor),
        init_kwargs={
            "config": replace(manager_config(settings), tenant_pin_bytes=pin_shares(settings, secret)),
            "with_redis": settings.kv.enabled and settings.kv.redis_url is not None,
            "quotas": tenant_quotas(settings, secret),
            "roles": RoleShares(settings.roles.prefill, settings.decode_replicas),
        },
        actor_options={"num_cpus": 0, "max_concurrency": MANAGER_CONCURRENCY},
    )


def _redis_tier(settings: Settings, secret: ServerSecret) -> list[DeploymentActorConfig]:
    """The Redis tier's actor, where there is one: Serve's controller starts and recreates it, like the manager."""
    config = RedisTierConfig.from_settings(settings)
    if config is None:
        return []
    return [
        DeploymentActorConfig(
            name=REDIS_ACTOR,
            actor_class=ray.remote(RedisTier),
            init_kwargs={"config": config, "secret": secret},
            actor_options={"num_cpus": 0},
        )
    ]
