#!/bin/sh
# Makes the Secrets that the manifests name, unless they are there: what each role of deploy/redis/users.acl has, the
# certificate of the component `redis`, and nothing that stands in a manifest or is shown.
#
#   sh deploy/kubernetes/secrets.sh NAMESPACE [HOST[:PORT]]
#
# HOST is where Redis is, penstock-redis as a default. For a Redis of your own make penstock-redis-urls by hand: one key per
# role, `worker` and `gateway` at least, each a URL; and penstock-redis-tls with its authority as ca.crt.
set -eu
namespace=$1
address=${2:-penstock-redis:6379}
host=${address%:*}
here=$(cd "$(dirname "$0")" && pwd)

if kubectl --namespace "$namespace" get secret penstock-redis-passwords > /dev/null 2>&1; then
  echo "there are passwords in $namespace already; nothing is changed"
  exit 0
fi
umask 077
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/certificates" "$folder/urls" "$folder/autoscaler"
sh "$here/../compose/certificates.sh" "$folder/certificates" "$host" "$host.$namespace" "$host.$namespace.svc"
sh "$here/../compose/credentials.sh" "$folder/access" "$folder/certificates"
passwords=$folder/access/redis/passwords
for role in worker gateway producer operator; do
  printf 'rediss://%s:%s@%s/0?ssl_ca_certs=/run/penstock/ca.crt' "$role" "$(cat "$passwords/$role")" "$address" \
    > "$folder/urls/$role"
done
printf autoscaler > "$folder/autoscaler/username"
printf enable > "$folder/autoscaler/tls"
cp "$passwords/autoscaler" "$folder/autoscaler/password"

make_secret() {
  kubectl --namespace "$namespace" create secret generic "$@"
}
make_secret penstock-redis-tls --from-file="$folder/access/redis/tls"
make_secret penstock-redis-urls --from-file="$folder/urls"
make_secret penstock-autoscaler --from-file="$folder/autoscaler"
make_secret penstock-redis-passwords --from-file="$passwords"
