#!/usr/bin/env bash
# Runs a command with Mooncake, which the package index has built: its client can be imported, and its
# programs are in the folder that PENSTOCK_TEST_MOONCAKE names. It is installed once, in an environment
# of its own.
#
# Usage: scripts/mooncake.sh VENV VERSION COMMAND [ARGUMENT...]
set -euo pipefail

venv=$1 version=$2
shift 2
folder=$(realpath -m "$venv")/mooncake-$version

# It links to the RDMA libraries even where it only uses TCP.
if ! ldconfig -p | grep -q libibverbs.so.1; then
    root=()
    [[ $(id -u) -eq 0 ]] || root=(sudo)
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y install \
        --no-install-recommends libibverbs1 librdmacm1 libnuma1 >&2
fi

if [[ ! -e $folder/.done ]]; then
    "$venv/bin/python" -m venv --without-pip "$folder"
    scripts/uv.sh "$venv" pip install --quiet --python "$folder/bin/python" --no-deps \
        "mooncake-transfer-engine-non-cuda==$version"
    touch "$folder/.done"
fi

packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PENSTOCK_TEST_MOONCAKE=$folder/bin PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$packages
exec "$@"
