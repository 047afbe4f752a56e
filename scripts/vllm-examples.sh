#!/usr/bin/env bash
# Runs a command with vLLM's own examples and tests, which only its source distribution has: they are
# in the folder that PENSTOCK_TEST_VLLM_EXAMPLES names. They are fetched once.
#
# Usage: scripts/vllm-examples.sh VENV VERSION COMMAND [ARGUMENT...]
set -euo pipefail

venv=$1 version=$2
shift 2
folder=$(realpath -m "$venv")/vllm-examples-$version

if [[ ! -e $folder/.done ]]; then
    archive=$(mktemp)
    trap 'rm -f "$archive"' EXIT
    "$venv/bin/python" scripts/fetch-sdist.py vllm "$version" "$archive"
    rm -rf "$folder"
    mkdir -p "$folder"
    tar --extract --gzip --file "$archive" --directory "$folder" --strip-components 1 \
        "vllm-$version/examples/disaggregated" "vllm-$version/tests/v1/kv_connector"
    touch "$folder/.done"
fi

export PENSTOCK_TEST_VLLM_EXAMPLES=$folder
exec "$@"
