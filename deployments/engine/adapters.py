"""The LoRA adapters of a replica's engine: loaded before its first request, and never again.

vLLM reads an adapter's files when a request first brings it, and again once it has made room for others. Here the
engine has room for all, and loads each from a copy of its folder as it starts, of which the digest is made. So the
files that are named are those that answer, whatever becomes of the folder.

Leans on vLLM: `EngineCore.add_lora`; `LRUCacheWorkerLoRAManager.add_adapter`, which reads no files of an adapter whose
`lora_int_id` it has; `LoRAConfig.max_cpu_loras`, how many it keeps; `_gen_lora_extra_hash_keys`, by which a request's
`lora_name` and `lora_path` are in the hash of each of its blocks.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from vllm.lora.request import LoRARequest

from configs.lora_adapters import adapter_digest
from configs.settings import Settings
from kvmanager.segments.keys import AdapterName

logger = logging.getLogger(__name__)


class AddsAdapters(Protocol):
    """vLLM's EngineCore, as far as it is used here."""

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        ...


def load_adapters(core: AddsAdapters, settings: Settings) -> Mapping[AdapterName, LoRARequest]:
    """Load all adapters into an engine; returns what a request of each brings. On the engine thread, before requests.

    An adapter whose files are not those that the application was started with is left out, and logged. Raises whatever
    vLLM raises for one that does not fit the model.
    """
    loaded: dict[AdapterName, LoRARequest] = {}
    adapters = settings.engine.lora_adapters
    for number, name in enumerate(sorted(adapters), start=1):
        folder, wanted = adapters[name].folder, adapters[name].sha256
        with tempfile.TemporaryDirectory(prefix="crosskv-") as place:
            # vLLM maps the weights into memory, and a write into a mapped file changes the adapter.
            copy = shutil.copytree(folder, Path(place) / "adapter")
            digest = adapter_digest(copy)
            if wanted is None or digest == wanted:
                core.add_lora(LoRARequest(name, number, str(copy)))
                loaded[AdapterName(name, digest)] = LoRARequest(name, number, digest)
                continue
        logger.error(
            "adapter %s is not served by this replica: the files in %s are not those that the server was started "
            "with; start the server again, or put them back",
            name,
            folder,
        )
    return loaded
