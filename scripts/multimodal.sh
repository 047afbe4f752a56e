#!/usr/bin/env bash
# Runs a command in an environment that has what models for images and sound need beside vLLM. Installs
# it beside the virtual environment once. vLLM's CPU build comes without it.
#
# Usage: scripts/multimodal.sh VENV TORCHVISION COMMAND [ARGUMENT...]
set -euo pipefail

venv=$1 torchvision=$2
shift 2
folder=$(realpath -m "$venv")/multimodal-$torchvision

if [[ ! -e $folder/.done ]]; then
    # torch stays the environment's own: TORCHVISION is the version that is built for it.
    scripts/uv.sh "$venv" pip install --quiet --python "$venv/bin/python" --no-deps --target "$folder" \
        "torchvision==$torchvision" "timm==1.0.31" "torchaudio==2.11.0"
    touch "$folder/.done"
fi

export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
exec "$@"
