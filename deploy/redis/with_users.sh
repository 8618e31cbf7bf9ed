#!/bin/sh
# Starts Redis in its image with the roles of users.acl that have a password in the environment: REDIS_PASSWORD is that of
# `default`, who may do everything, ROLE_PASSWORD that of another role, such as GATEWAY_PASSWORD. Arguments are the server's.
set -eu

sum() {
  printf %s "$1" | sha256sum | cut -d ' ' -f 1
}

users=$(mktemp)
sed "s/^user default off\$/user default on #$(sum "$REDIS_PASSWORD") ~* \&* +@all/" "$(dirname "$0")/users.acl" > "$users"
for role in $(sed -n 's/^user \([a-z]*\) on .*/\1/p' "$users"); do
  password=$(printenv "$(printf %s "$role" | tr a-z A-Z)_PASSWORD" || :)
  [ -z "$password" ] || sed -i "s/^user $role on/& #$(sum "$password")/" "$users"
done
chmod 644 "$users" # the server is another user; there are sums in it, no passwords
exec docker-entrypoint.sh redis-server --aclfile "$users" "$@"
