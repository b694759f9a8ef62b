"""What app/ and deployments/ lean on inside Ray that Ray does not promise. After an upgrade `test_ray_symbols.py` says
what is gone. Whatever Ray has a public name for is imported by that name."""

VERSION = "2.60.0"
"""The one version that this project is tested with; the lock files pin it."""

PRIVATE: dict[str, tuple[set[str], str]] = {
    "ray._common.tls_utils": (
        {"add_port_to_grpc_server"},
        "what is replaced in `ray.serve._private.replica` must do the same, on another address",
    ),
    "ray._private.authentication.authentication_utils": (
        {"is_token_auth_enabled"},
        "nobody else says whether Ray asks for a token",
    ),
    "ray._private": (
        {"services"},
        "a raylet whose agents are slow ends, unless it is told their ports, for which `ray.init` has no arguments",
    ),
    "ray._private.worker": (
        {"global_worker"},
        "it has the actor of this process, which Serve tells that it is being stopped",
    ),
    "ray.core.generated.gcs_pb2": (
        {"ActorTableData"},
        "the states of an actor, as a handle gives them",
    ),
    "ray.serve._private": (
        {"replica"},
        "Serve binds a replica's gRPC server to all addresses, and has no setting for it",
    ),
    "ray.serve._private.common": (
        {"ReplicaQueueLengthInfo"},
        "what a call answers that a replica has taken",
    ),
    "ray.serve._private.replica_result": (
        {"gRPCReplicaResult"},
        "Serve sends a stream again whose replica took it and died at once, and has no setting for it",
    ),
    "ray.serve._private.request_router": (
        {"replica_wrapper"},
        "the module in which Serve makes the results of its calls",
    ),
    "ray.serve._private.constants": (
        {"SERVE_CONTROLLER_NAME", "SERVE_NAMESPACE"},
        "the names by which Serve's controller is found",
    ),
}
"""From module to names, and why there is no way without."""

USED: dict[str, set[str]] = {
    "ray.actor:ActorHandle": {"_get_local_state"},
    "ray.serve._private.replica:ReplicaActor": {"get_num_ongoing_requests"},
    "ray.serve.config:AutoscalingConfig": {
        "downscale_delay_s",
        "look_back_period_s",
        "max_replicas",
        "metrics_interval_s",
        "min_replicas",
        "policy",
        "upscale_delay_s",
    },
    "ray.serve.config:AutoscalingContext": {
        "aggregated_metrics",
        "app_name",
        "capacity_adjusted_max_replicas",
        "capacity_adjusted_min_replicas",
        "current_num_replicas",
        "current_time",
        "raw_metrics",
        "running_replicas",
        "target_num_replicas",
    },
    "ray.serve.config:AutoscalingPolicy": {"policy_function", "policy_kwargs"},
    "ray.serve.handle:_DeploymentResponseBase": {"_replica_result_future", "cancel"},
    "ray.serve.request_router:PendingRequest": {"args", "routing_context"},
    "ray.serve.request_router:RequestRouter": {
        "choose_replicas",
        "initialize_state",
        "on_request_completed",
        "on_request_routed",
        "update_replicas",
    },
    "ray.serve.request_router:RunningReplica": {"_actor_handle", "replica_id"},
}
"""From class to attributes: private ones, and those of classes that Ray calls alpha."""
