#!/bin/sh
# Starts Redis in its image: with the roles of users.acl that have a password, and with TLS where there is a certificate.
# Arguments are the server's.
#
#   /run/penstock/passwords/ROLE   the password of a role, such as `worker`; a role that has none lets nobody in
#   /run/penstock/tls/             tls.crt, tls.key and ca.crt; with them nothing but TLS is spoken
#
# REDIS_SECRETS is another folder than /run/penstock. What Compose and Kubernetes put there is written in docs/deployment.md.
set -eu
secrets=${REDIS_SECRETS:-/run/penstock}

users=$(mktemp)
cp "$(dirname "$0")/users.acl" "$users"
for role in $(sed -n 's/^user \([a-z]*\) on .*/\1/p' "$users"); do
  file=$secrets/passwords/$role
  [ -s "$file" ] || continue
  sed -i "s/^user $role on/& #$(tr -d '\n' < "$file" | sha256sum | cut -d ' ' -f 1)/" "$users"
done
grep -q '^user admin on #' "$users" || { echo "$secrets/passwords/admin is missing or empty" >&2; exit 1; }
chmod 644 "$users" # the server may be another user; there are sums in it, no passwords

if [ -s "$secrets/tls/tls.crt" ]; then
  set -- "$@" --port 0 --tls-port 6379 --tls-auth-clients no --tls-cert-file "$secrets/tls/tls.crt" \
    --tls-key-file "$secrets/tls/tls.key" --tls-ca-cert-file "$secrets/tls/ca.crt"
fi
exec docker-entrypoint.sh redis-server --aclfile "$users" "$@"
