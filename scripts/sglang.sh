#!/usr/bin/env bash
# Runs a command with SGLang on torch's CPU build. Installs it beside the virtual environment once,
# with the packages that its host pools, its cache controller and its storage factory import. All else
# is the environment's.
#
# Usage: scripts/sglang.sh VENV VERSION COMMAND [ARGUMENT...]
set -euo pipefail

venv=$1 version=$2
shift 2
folder=$(realpath -m "$venv")/sglang-$version

if [[ ! -e $folder/.done ]]; then
    scripts/uv.sh "$venv" pip install --quiet --python "$venv/bin/python" --no-deps \
        --target "$folder" "sglang==$version" gguf==0.19.0 ipython==9.18.1 orjson==3.13.0 \
        torchvision==0.29.2 traitlets==5.16.1 triton==3.9.0
    touch "$folder/.done"
fi

# What SGLang compiles stays there too.
export TORCH_EXTENSIONS_DIR=$folder/extensions
export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
exec "$@"
