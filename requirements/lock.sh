#!/usr/bin/env bash
# Refreshes requirements/*.txt from *.in with uv (`make lock`). To move one package: `make lock LOCK_ARGS='-P name'`;
# all of them: `make lock LOCK_ARGS=--upgrade`.
set -euo pipefail
uv=$(realpath "${1:?usage: lock.sh PATH_TO_UV [uv arguments]}")
shift
cd "$(dirname "$0")"

# shellcheck source=requirements/sources.sh
. ./sources.sh
take_sources_of_pip "$(dirname "$uv")/python"
export UV_CUSTOM_COMPILE_COMMAND='make lock'

compile() {
    "$uv" pip compile --quiet --python-version 3.11 --index-strategy unsafe-best-match "$@"
}
cpu() { compile cpu.in --override cpu-overrides.txt -o cpu.txt "$@"; }

# torch's CPU build lies on PyTorch's own index, which is asked only where the configured one does not have it.
cpu "$@" || UV_INDEX="${UV_INDEX:-} https://download.pytorch.org/whl/cpu" cpu "$@"
# A find-links folder may hold torch's CPU build, which would count as newer than the CUDA build of the same version.
(unset UV_FIND_LINKS; compile cuda.in --python-platform x86_64-unknown-linux-gnu -o cuda.txt "$@")
compile bench.in -o bench.txt "$@"
compile dev.in -o dev.txt "$@"
