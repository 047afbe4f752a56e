#!/usr/bin/env bash
# Runs a command in an environment in which vLLM's CPU build has model runner V2: Triton is there, and
# interprets its kernels. Installs that beside the virtual environment once.
#
# Usage: scripts/model-runner-v2.sh VENV COMMAND [ARGUMENT...]
set -euo pipefail

venv=$1
shift
folder=$(realpath -m "$venv")/triton

if [[ ! -e $folder/.done ]]; then
    install=(scripts/uv.sh "$venv" pip install --quiet --python "$venv/bin/python" --no-deps)
    # The version that torch asks for.
    triton=$("$venv/bin/python" - <<'PYTHON'
from importlib.metadata import requires

asked = next(line for line in requires("torch") or () if line.startswith("triton=="))
print(asked.partition(";")[0].strip())
PYTHON
    )
    "${install[@]}" --target "$folder" "$triton"
    "${install[@]}" --no-build-isolation --target "$folder" ./requirements/triton-interpreter
    touch "$folder/.done"
fi

export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
export TRITON_INTERPRET=1 TRITON_DEFAULT_BACKEND=cpu VLLM_USE_V2_MODEL_RUNNER=1
exec "$@"
