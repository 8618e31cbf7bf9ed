#!/bin/sh
# Before everything else: draws a password for each role of deploy/redis/users.acl that has none, and writes for each program
# what it alone is to know. What is there stays, so the second start changes nothing.
#
#   credentials.sh FOLDER [CERTIFICATES]    CERTIFICATES is the folder of certificates.sh, empty without the profile `tls`
#
#   FOLDER/redis/passwords/ROLE, tls/       for the server
#   FOLDER/ROLE/penstock.toml               for a program: its Redis URL, and for the gateway that of an operator, for the page
#                                           that looks after queues; with TLS ca.crt, and for the gateway a certificate
#   FOLDER/grafana/password                 of Grafana's user `admin`
#
# Each of the second level is a volume of its own, and a container has those that it needs.
set -eu
umask 022
folder=$1
certificates=${2:-}
[ -s "$certificates/ca.crt" ] || certificates=

draw() { # a password of letters and digits, as they stand in URLs, into the file $1, unless it is there
  [ -s "$1" ] && return
  head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n' > "$1.new"
  chmod "$2" "$1.new"
  mv "$1.new" "$1"
}

mkdir -p "$folder/redis/passwords" "$folder/redis/tls" "$folder/grafana"
for role in admin worker gateway producer operator autoscaler reader; do
  draw "$folder/redis/passwords/$role" 400
done
draw "$folder/grafana/password" 444

scheme=redis query=
if [ -n "$certificates" ]; then
  scheme=rediss query='?ssl_ca_certs=/run/penstock/ca.crt'
  install -m 444 "$certificates/ca.crt" "$folder/redis/tls/ca.crt"
  install -m 444 "$certificates/redis.key" "$folder/redis/tls/tls.key" # the server is another user than its entry point
  install -m 444 "$certificates/redis.crt" "$folder/redis/tls/tls.crt"
fi
url_of() { # of a role
  echo "\"$scheme://$1:$(cat "$folder/redis/passwords/$1")@redis:6379/0$query\""
}

for role in worker gateway producer operator; do
  mkdir -p "$folder/$role"
  {
    [ "$role" != gateway ] || echo '[gateway]'
    echo "redis_url = $(url_of "$role")"
    [ "$role" != gateway ] || echo "operator_redis_url = $(url_of operator)"
  } > "$folder/$role/penstock.toml.new"
  if [ -n "$certificates" ]; then
    install -m 444 "$certificates/ca.crt" "$folder/$role/ca.crt"
    if [ "$role" = gateway ]; then
      install -m 444 "$certificates/gateway.crt" "$folder/gateway/tls.crt"
      install -m 444 "$certificates/gateway.key" "$folder/gateway/tls.key"
      printf 'tls_certificate = "/run/penstock/tls.crt"\ntls_key = "/run/penstock/tls.key"\n' >> "$folder/gateway/penstock.toml.new"
    fi
  fi
  mv "$folder/$role/penstock.toml.new" "$folder/$role/penstock.toml"
done
