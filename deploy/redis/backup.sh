#!/bin/sh
# A copy of all queues to stdout, as an RDB file, while they are at work: it is read as a replica would read it.
#
#   docker compose exec -T redis /etc/penstock/backup.sh > penstock.rdb
#   kubectl exec penstock-redis-0 -- /etc/penstock/backup.sh > penstock.rdb
set -eu
secrets=${REDIS_SECRETS:-/run/penstock}
set -- --user admin
[ ! -s "$secrets/tls/tls.crt" ] || set -- "$@" --tls --cacert "$secrets/tls/ca.crt"
REDISCLI_AUTH=$(cat "$secrets/passwords/admin")
export REDISCLI_AUTH
exec redis-cli "$@" --rdb -
