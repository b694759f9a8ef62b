#!/bin/sh
# Ray Serve starts this in place of HAProxy, as `haproxy.sh -db -f CONFIG …`, each time that it has written CONFIG anew.
# What Ray writes there for a cluster of its own is made fit for a machine with other users; app/launch/haproxy.py says how.
set -eu

config=
previous=
for word in "$@"; do
    if [ "$previous" = -f ]; then
        config=$word
    fi
    previous=$word
done

# Without a configuration it is asked for its version.
[ -z "$config" ] || sed -i -E \
    -e '/^frontend prometheus/,/^frontend http_frontend/{/^frontend http_frontend/!d}' \
    -e '/^listen stats/,$d' \
    -e 's/^( *stats socket .*) mode 666 /\1 mode 600 /' \
    -e 's/^( *log .* local0) info$/\1 notice/' \
    -e "s#^( *errorfile 50[234]) .*#\\1 $CROSSKV_HAPROXY_NOT_READY#" \
    -e 's#^( *)option abortonclose$#&\n\1option forwardfor except 127.0.0.0/8\n\1timeout http-request 30s#' \
    "$config"

exec "$CROSSKV_HAPROXY" "$@"
