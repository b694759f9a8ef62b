#!/usr/bin/env bash
# Finds or installs a Chromium, which the tests of the page need. Fails nobody: linters need none, and a session of tests
# without one ends at its beginning. Looked for: $CROSSKV_CHROMIUM (none: not at all), the PATH, .venv/browsers. Tried:
# Playwright's own download (its headless shell, into .venv/browsers), then Debian's package where this is root.
set -uo pipefail
cd "$(dirname "$0")/.."

browsers=$PWD/.venv/browsers
log=.venv/chromium.log

starts() { # PATH: whether it shows a page, so that missing libraries are noticed here
    timeout 60 "$1" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --dump-dom \
        'data:text/html,<p>it runs' 2>>"$log" | grep -q 'it runs'
}

found() {
    local name path
    for name in "${CROSSKV_CHROMIUM:-}" chromium chromium-browser google-chrome-stable google-chrome chrome \
        "$browsers"/chromium*/*/headless_shell "$browsers"/chromium*/*/chrome-headless-shell "$browsers"/chromium*/*/chrome; do
        if path=$(command -v "$name" 2>/dev/null) && starts "$path"; then
            echo "$path"
            return
        fi
    done
    return 1
}

if [ "${CROSSKV_CHROMIUM:-}" = none ] || [ -n "$(found)" ]; then exit 0; fi
echo "installing a Chromium for the tests of the page (log: $log)"
PLAYWRIGHT_BROWSERS_PATH=$browsers timeout 300 .venv/bin/python -m playwright install --only-shell chromium >>"$log" 2>&1
if [ -n "$(found)" ]; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { timeout 120 apt-get update &&
        DEBIAN_FRONTEND=noninteractive timeout 400 apt-get install --yes --no-install-recommends chromium; } >>"$log" 2>&1
    if [ -n "$(found)" ]; then exit 0; fi
fi
echo "crosskv: no Chromium could be found or installed (see $log), and the tests of the page need one: install Debian's" \
    "chromium or any Chrome, or name one with CROSSKV_CHROMIUM=; CROSSKV_CHROMIUM=none leaves the page untested" >&2
exit 0
