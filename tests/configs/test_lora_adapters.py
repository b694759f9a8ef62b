"""An adapter's digest is that of all that a copy of its folder holds, and of nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

from configs.lora_adapters import adapter_digest


def folder(at: Path) -> Path:
    (at / "inner").mkdir(parents=True)
    (at / "adapter_model.safetensors").write_bytes(b"weights")
    (at / "inner" / "more.json").write_bytes(b"{}")
    return at


def test_names_bytes_and_places_of_files_count(tmp_path: Path) -> None:
    one = folder(tmp_path / "one")
    digests = {adapter_digest(one)}
    (one / "inner" / "more.json").write_bytes(b"[]")
    digests.add(adapter_digest(one))
    (one / "inner" / "more.json").rename(one / "more.json")
    digests.add(adapter_digest(one))
    (one / "more.json").unlink()
    digests.add(adapter_digest(one))
    assert len(digests) == 4


def test_a_copy_has_the_same_digest_though_the_folder_is_made_of_links(tmp_path: Path) -> None:
    stored = folder(tmp_path / "stored")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "adapter_model.safetensors").symlink_to(stored / "adapter_model.safetensors")
    (linked / "inner").symlink_to(stored / "inner")
    copy = shutil.copytree(linked, tmp_path / "copy")
    assert adapter_digest(copy) == adapter_digest(linked) == adapter_digest(stored)
