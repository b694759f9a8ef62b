"""Deployments of the Redis tier that end with their test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import redis_deployment
from redis_deployment import Deployment, RayDeployment


@pytest.fixture
def deployments() -> Iterator[Callable[..., Deployment]]:
    """Starts deployments that end with the test."""
    with contextlib.ExitStack() as stack:

        def start(kind: type[Deployment] = Deployment, **config: Any) -> Deployment:
            return stack.enter_context(contextlib.closing(kind(**config)))

        yield start


@pytest.fixture
def in_ray(ray_cluster: Any) -> type[Deployment]:
    ray.cloudpickle.register_pickle_by_value(redis_deployment)  # Ray's workers cannot import that module
    return RayDeployment
