#!/usr/bin/env bash
# Runs a command with vllm-router, a router of the vLLM project, which the package index has built: its
# program is what PENSTOCK_TEST_VLLM_ROUTER names. It is installed once, in an environment of its own.
#
# Usage: scripts/vllm-router.sh VENV VERSION COMMAND [ARGUMENT...]
set -euo pipefail

venv=$1 version=$2
shift 2
folder=$(realpath -m "$venv")/vllm-router-$version

if [[ ! -e $folder/.done ]]; then
    "$venv/bin/python" -m venv "$folder"
    scripts/uv.sh "$venv" pip install --quiet --python "$folder/bin/python" "vllm-router==$version"
    touch "$folder/.done"
fi

export PENSTOCK_TEST_VLLM_ROUTER=$folder/bin/vllm-router
exec "$@"
