"""A Serve application on a Ray of its own, in the foreground until SIGINT or SIGTERM; nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil

from app.launch.cluster import ray_environment, ray_options, write_token
from app.launch.descendants import Descendants, become_subreaper
from app.launch.surroundings.folder import private_folder
from configs.machine.cores import cores
from configs.settings import Settings, SettingsError
from load_tests.peers.engine import Peer, peer_environment

HOST = "127.0.0.1"
_CPUS_PER_REPLICA = 2
"""Logical CPUs: a replica's actor and its engine. They share the machine's cores, as crosskv's parts do."""
_CPUS_BESIDE_REPLICAS = 4


def serve_until_signal(
    peer: Peer, settings: Settings, build: Callable[[], Any], metrics_port: int | None = None
) -> None:
    """Start Ray, run what `build` returns on `peer.port`, and end everything on SIGINT or SIGTERM.

    `metrics_port` is where Ray shows its metrics, among them Serve's count of requests by replica. Raises SettingsError
    when the port cannot be listened on, and whatever Serve raises when the application does not start.
    """
    require_free(peer.port)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts what is in its background with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    become_subreaper()
    folder = private_folder()
    os.environ.update(ray_environment(settings, write_token(folder)) | dict(peer_environment(settings)))
    descendants = Descendants(psutil.Process())
    import ray
    from ray import serve

    from app.launch.ray_start import start_ray

    cpus = max(cores(), settings.max_replicas * _CPUS_PER_REPLICA + _CPUS_BESIDE_REPLICAS)
    options = ray_options(settings, folder) | {"num_cpus": cpus, "_metrics_export_port": metrics_port}
    try:
        start_ray(options)
        serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": peer.port})
        serve.run(build(), name="peer", route_prefix="/")
        print(f"ready on http://{HOST}:{peer.port}", flush=True)
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        descendants.note()
        with contextlib.suppress(Exception, KeyboardInterrupt):  # the processes are ended below in any case
            serve.shutdown()
            ray.shutdown()
        descendants.end(threading.Event())
        shutil.rmtree(folder, ignore_errors=True)


def require_free(port: int) -> None:
    """Raises SettingsError, one sentence, when something listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise SettingsError(
                f"port {port} cannot be listened on ({error.strerror}); stop what uses it, or choose another."
            ) from None
