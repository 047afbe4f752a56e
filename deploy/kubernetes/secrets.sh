#!/bin/sh
# Makes the secrets that the example needs, with new random passwords. Prints them as one manifest.
#
# Usage: deploy/kubernetes/secrets.sh | kubectl apply --namespace penstock --filename -
set -eu
cd "$(dirname "$0")"

random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

engine=$(random) operator=$(random) grafana=$(random)
users=$(sed "s/ENGINE_PASSWORD/$engine/; s/OPERATOR_PASSWORD/$operator/; s/^/    /" users.acl)

cat <<END
apiVersion: v1
kind: Secret
metadata:
  name: pool-users
stringData:
  users.acl: |
$users
---
apiVersion: v1
kind: Secret
metadata:
  name: pool
stringData:
  engine-password: $engine
  operator-password: $operator
---
apiVersion: v1
kind: Secret
metadata:
  name: grafana
stringData:
  admin-password: $grafana
END
