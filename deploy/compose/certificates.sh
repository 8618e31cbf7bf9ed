#!/bin/sh
# The profile `tls`: makes an authority and certificates for Redis and the gateway, unless they are there.
#
#   certificates.sh FOLDER [NAME ...]    NAMEs are further names of this host that clients use, such as llm.example.org
#
# They last ten years: delete FOLDER/*.crt to have new ones. Certificates of your own go to the same places.
set -eu
umask 077
folder=$1
shift

names=DNS:localhost,IP:127.0.0.1
for name in "$@"; do names=$names,DNS:$name; done

if [ ! -s "$folder/ca.crt" ]; then
  rm -f "$folder"/*.crt
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj '/CN=Penstock' \
    -addext 'basicConstraints=critical,CA:TRUE' -addext 'keyUsage=critical,keyCertSign' \
    -keyout "$folder/ca.key" -out "$folder/ca.crt" 2> /dev/null
fi
for service in redis gateway; do
  [ ! -s "$folder/$service.crt" ] || continue
  printf 'subjectAltName=DNS:%s,%s\nextendedKeyUsage=serverAuth\n' "$service" "$names" > "$folder/extensions"
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$service" \
    -keyout "$folder/$service.key" -out "$folder/request" 2> /dev/null
  openssl x509 -req -in "$folder/request" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -CAcreateserial -days 3650 \
    -extfile "$folder/extensions" -out "$folder/$service.crt.new" 2> /dev/null
  mv "$folder/$service.crt.new" "$folder/$service.crt"
  rm "$folder/request" "$folder/extensions"
done
