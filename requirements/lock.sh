#!/usr/bin/env bash
# Refreshes requirements/*.txt from *.in with uv (`make lock`), for Python 3.11 to 3.14, with the digests of their files.
# To move one package: `make lock LOCK_ARGS='-P name'`; all of them: `make lock LOCK_ARGS=--upgrade`.
set -euo pipefail
uv=$(realpath "${1:?usage: lock.sh PATH_TO_UV [uv arguments]}")
shift
cd "$(dirname "$0")"

# shellcheck source=requirements/sources.sh
. ./sources.sh
python=$(dirname "$uv")/python
take_sources_of_pip "$python"
export UV_CUSTOM_COMPILE_COMMAND='make lock'

compile() {
    "$uv" pip compile --quiet --universal --python-version 3.11 --index-strategy unsafe-best-match "$@"
}
cpu() { compile cpu.in --override cpu-overrides.txt -o cpu.txt "$@"; }

# torch's CPU build lies on PyTorch's own index, which is asked only where the configured one does not have it.
cpu "$@" || UV_INDEX="${UV_INDEX:-} https://download.pytorch.org/whl/cpu" cpu "$@"
# A find-links folder may hold torch's CPU build, which would count as newer than the CUDA build of the same version.
(unset UV_FIND_LINKS; compile cuda.in -o cuda.txt "$@")
compile bench.in -o bench.txt "$@"
compile dev.in -o dev.txt "$@"
for file in cpu.txt cuda.txt bench.txt dev.txt; do "$python" markers.py $file; done

# The digests of every file that the default index has of a package: for all platforms, which folders and indexes of one
# machine do not have. torch's CPU build is not there, so its digest is not known for all.
add_hashes() { # FILE
    local pins
    pins=$(mktemp -d)
    grep -E '^[A-Za-z0-9]' "$1" | grep -vE '^torch==[^ ]*\+cpu' >"$pins/pins.in"
    (
        unset UV_FIND_LINKS UV_INDEX
        "$uv" pip compile --quiet --no-deps --generate-hashes --no-annotate --no-header --universal --python-version 3.11 \
            "$pins/pins.in" -o "$pins/hashed.txt"
    )
    awk 'NR == FNR { if (/^[A-Za-z0-9]/) pin = $1; else if (/--hash=/) hashes[pin] = hashes[pin] " \\\n    " $1; next }
         { print $0 (/^[A-Za-z0-9]/ ? hashes[$1] : "") }' "$pins/hashed.txt" "$1" >"$pins/both.txt"
    cat "$pins/both.txt" >"$1"
    rm -r "$pins"
}
for file in cpu.txt cuda.txt bench.txt dev.txt; do add_hashes "$file"; done
