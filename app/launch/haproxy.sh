#!/bin/sh
# Ray Serve starts this in place of HAProxy, as `haproxy.sh -db -f CONFIG …`, each time that it has written CONFIG again.
# What Ray writes there for a cluster of its own is made fit for a machine with other users; app/launch/haproxy.py says how.
set -eu

config=
checks=
previous=
for word in "$@"; do
    if [ "$previous" = -f ]; then
        config=$word
    elif [ "$word" = -c ]; then
        checks=yes
    fi
    previous=$word
done

# Without a configuration it is asked for its version.
if [ -n "$config" ]; then
    sed -i -E \
        -e '/^frontend prometheus/,/^frontend http_frontend/{/^frontend http_frontend/!d}' \
        -e '/^listen stats/,$d' \
        -e 's/^( *stats socket .*) mode 666 /\1 mode 600 /' \
        -e 's/^( *log .* local0) info$/\1 notice/' \
        -e "s#^( *errorfile 50[234]) .*#\\1 $CROSSKV_HAPROXY_NOT_READY#" \
        -e 's#^( *)option abortonclose$#&\n\1timeout http-request 30s#' \
        -e '/^frontend http_frontend/,/^ *bind /s#^( *)bind .*#&\n\1http-request add-header X-Forwarded-For %[src] unless { src 127.0.0.0/8 ::1 }#' \
        -e "/^frontend http_frontend/,/^ *bind /{/^ *bind /r $CROSSKV_HAPROXY_RULES
}" \
        "$config"
    host=$(sed -n -E '/^frontend http_frontend/,/^ *bind /s#^ *bind (.*):[0-9]+$#\1#p' "$config")
    case $host in
        '' | 0.0.0.0 | ::) ;;
        *) sed -i -E "s#^( *server [^ ]+) 127\\.0\\.0\\.1:#\\1 $host:#" "$config" ;;
    esac
    # Without an application there is a backend without servers left, which errorfile 503 answers.
    grep -q '^ *use_backend ' "$config" || sed -i '/^ *http-request return status 404 /d' "$config"
fi

# Ray asks the process that it has started, so that one becomes HAProxy. The launcher is told: app.launch.haproxy.StandIn.
if [ -n "$config" ] && [ -z "$checks" ]; then
    printf '%s\n%s\n' $$ "$config" >"$CROSSKV_HAPROXY_STARTED.new"
    mv "$CROSSKV_HAPROXY_STARTED.new" "$CROSSKV_HAPROXY_STARTED"
    # The port is not shared: what the launcher has put into a dead one's place gives it up when it is told so.
    stand_in=$(cat "$CROSSKV_HAPROXY_STARTED.instead" 2>/dev/null || true)
    if [ -n "$stand_in" ] && grep -q stand-in.cfg "/proc/$stand_in/cmdline" 2>/dev/null; then
        set -- "$@" -sf "$stand_in"
    fi
fi

exec "$CROSSKV_HAPROXY" "$@"
