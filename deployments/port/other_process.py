"""A second port of a replica, in a process that the replica started: it joins the cluster by itself.

Such a process is a driver to Ray, with a job of its own. So it starts no actors: they would have that job's environment
and not the replica's. The credentials that the cluster asks for are in the environment, which processes inherit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import ray

from configs.kv_section import KVSettings
from deployments.port.cluster_port import ClusterPort
from deployments.protocol.manager_client import SERVE_NAMESPACE, ManagerClient

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenThere:
    """Call it in the other process, once. Can be pickled."""

    gcs_address: str
    app_name: str
    replica: str
    node_id: str
    settings: KVSettings

    def __call__(self) -> ClusterPort:
        """Join, and open the port."""
        ray.init(address=self.gcs_address, namespace=SERVE_NAMESPACE, log_to_driver=False, configure_logging=False)
        joined = ray.get_runtime_context().get_node_id()
        if joined != self.node_id:  # two nodes on one machine: segments of this node's tier are copied to that one
            logger.warning("the engine's process has joined node %s, its replica is on %s", joined, self.node_id)
        manager = ManagerClient(self.app_name)
        return _PortThere(self.app_name, self.replica, self.node_id, self.settings, manager, starts_tier=False)


class _PortThere(ClusterPort):
    """Closing it leaves the cluster."""

    def close(self) -> None:
        """See `ClusterPort`."""
        super().close()
        ray.shutdown()
