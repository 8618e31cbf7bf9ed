#!/bin/sh
# Whether the server in this container answers: for the probes of Compose and Kubernetes. One that still loads does not.
set -eu
secrets=${REDIS_SECRETS:-/run/penstock}
set -- --user admin
[ ! -s "$secrets/tls/tls.crt" ] || set -- "$@" --tls --cacert "$secrets/tls/ca.crt"
REDISCLI_AUTH=$(cat "$secrets/passwords/admin")
export REDISCLI_AUTH
redis-cli "$@" ping | grep -qx PONG
