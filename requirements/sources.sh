# Sourced by install.sh and lock.sh: tells uv where pip looks for packages, which uv would not read by itself.

take_sources_of_pip() { # PYTHON: one that has pip
    local settings name
    settings=$("$1" -m pip config list 2>/dev/null)
    pip_setting() { # every value of one pip setting, from pip's files and environment
        sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" <<<"$settings" | tr '\n' ' '
    }
    export UV_FIND_LINKS UV_INDEX UV_DEFAULT_INDEX
    UV_FIND_LINKS=$(pip_setting find-links | xargs -rn1 | sort -u | paste -sd,)
    UV_INDEX=$(pip_setting extra-index-url)
    UV_DEFAULT_INDEX=$(pip_setting index-url | xargs -rn1 | tail -1)
    for name in UV_FIND_LINKS UV_INDEX UV_DEFAULT_INDEX; do
        [ -n "${!name// /}" ] || unset "$name"
    done
}
