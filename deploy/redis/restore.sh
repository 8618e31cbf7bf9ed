#!/bin/sh
# Makes an append-only file of the RDB file on stdin, in an empty data folder, before the server is started on it. A server
# that is started with `appendonly yes` beside an RDB file would come up empty, and say nothing.
#
#   docker compose run --rm --no-deps -T redis /etc/penstock/restore.sh /data < penstock.rdb
set -eu
data=$1
if [ -e "$data/appendonlydir" ]; then
  echo "$data/appendonlydir is there: this folder has the data of a server, move it away first" >&2
  exit 1
fi
scratch=$(mktemp -d)
cat > "$data/restored.rdb"
redis-server --port 0 --unixsocket "$scratch/socket" --dir "$data" --dbfilename restored.rdb --save '' --appendonly no \
  > "$scratch/log" 2>&1 &
server=$!

ask() {
  redis-cli -s "$scratch/socket" "$@"
}
until [ "$(ask ping 2> /dev/null)" = PONG ]; do
  kill -0 "$server" 2> /dev/null || { tail -n 5 "$scratch/log" >&2; exit 1; }
  sleep 0.2
done
ask config set appendonly yes > /dev/null
until ask info persistence | tr -d '\r' | grep -qx aof_rewrite_in_progress:0 &&
  ask info persistence | tr -d '\r' | grep -qx aof_rewrite_scheduled:0; do
  sleep 0.2
done
ask info persistence | tr -d '\r' | grep -qx aof_last_bgrewrite_status:ok || { tail -n 5 "$scratch/log" >&2; exit 1; }
echo "restored $(ask dbsize) keys" >&2
ask shutdown nosave
wait "$server" || :
rm -r "$data/restored.rdb" "$scratch"
[ "$(id -u)" != 0 ] || chown -R "$(stat -c %u:%g "$data")" "$data/appendonlydir"
