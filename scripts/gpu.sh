#!/usr/bin/env bash
# Checks and measures Penstock on this machine's NVIDIA GPU. Every part goes into a folder: what it
# said, its figures, and the logs of its engines. A part that fails does not keep the others from
# running.
#
# Usage: scripts/gpu.sh PYTHON FOLDER [PART...]
#
# PYTHON has Penstock and PyTorch for CUDA, and vLLM for the parts that need it. The parts:
#
#   copies    every byte in every layout; copies against contiguous ones and against one for each piece
#   order     stores and loads against late writes and reads, graphs being captured, a busy device
#   exact     hits against vLLM's own, bit for bit, with faults: full attention, windows, MLA
#   graphs    the same with CUDA graphs and compiled kernels
#   v1        the same with model runner V1
#   sync      the same without asynchronous scheduling
#   engine    first tokens and decoding beside vLLM's OffloadingConnector; shape of Llama-3 8B
#   small     the same with 1 GiB of host memory: no store may be dropped
#
# GPU_SECONDS bounds each part (default 1800). GPU_COPIES are options of `copies`, which takes some
# minutes: GPU_COPIES='--total 1073741824 --passes 5' is faster. Exit status: 0 if every part went
# well, else 1; 2 if nothing could be run.
set -uo pipefail

fail() {
    printf 'gpu: %s\n' "$*" >&2
    exit 2
}

(($# >= 2)) || fail 'usage: scripts/gpu.sh PYTHON FOLDER [PART...]'
python=$1 folder=$(realpath -m "$2")
shift 2
cd "$(dirname "$0")/.." || exit 2
every=(copies order exact graphs v1 sync engine small)
parts=("$@")
((${#parts[@]})) || parts=("${every[@]}")
for part in "${parts[@]}"; do
    [[ " ${every[*]} " == *" $part "* ]] || fail "no part is named $part: choose of ${every[*]}"
done

# Requests are greedy, so nothing changes; but FlashInfer would compile its sampler for minutes.
export VLLM_USE_FLASHINFER_SAMPLER=0

"$python" - <<'PYTHON' || exit 2
import sys

try:
    import penstock._native
except ImportError as error:
    sys.exit(f"gpu: Penstock is not installed there ({error}): PYTHON -m pip install .")
try:
    import torch
except ImportError as error:
    sys.exit(f"gpu: PyTorch is not installed there: {error}")
if not torch.cuda.is_available():
    sys.exit("gpu: PyTorch sees no CUDA device here")
print(f"gpu: {torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
PYTHON

has_vllm=$("$python" -c 'import importlib.util as u; print(u.find_spec("vllm") is not None)')
mkdir -p "$folder" || exit 2
summary=() worst=0

# run NAME COMMAND...: a part, with its output in the folder.
run() {
    local name=$1 begin=$SECONDS status=0
    shift
    [[ " ${parts[*]} " == *" $name "* ]] || return 0
    printf '\n== %s\n' "$name"
    # Interrupted, a bench ends its engines and keeps their logs.
    timeout --signal=INT --kill-after=60 "${GPU_SECONDS:-1800}" "$@" 2>&1 | tee "$folder/$name.txt" || status=$?
    local line
    line=$(printf '%-10s %5d s' "$name" $((SECONDS - begin)))
    case $status in
        0) ;;
        124 | 137) line+='  FAILED: out of time' ;;
        *) line+="  FAILED: status $status" ;;
    esac
    summary+=("$line")
    ((status == 0)) || worst=1
}

# with_vllm NAME: whether a part that needs vLLM can run; else the summary says so.
with_vllm() {
    [[ $has_vllm == True ]] && return
    if [[ " ${parts[*]} " == *" $1 "* ]]; then
        summary+=("$(printf '%-10s skipped: no vLLM there' "$1")")
    fi
    return 1
}

# bench NAME MODULE ARGUMENT...: a part that is a bench. Its result names what is not committed.
bench() {
    local name=$1 module=$2
    shift 2
    run "$name" "$python" -m "benches.$module" --uncommitted --json "$folder/$name.json" "$@"
}

# exact NAME ARGUMENT...
exact() {
    local name=$1
    shift
    with_vllm "$name" || return 0
    bench "$name" exactness --device cuda --pools file --strict --hits 60 --logs "$folder/logs/$name" \
        "$@"
}

# engine NAME ARGUMENT...
engine() {
    local name=$1
    shift
    with_vllm "$name" || return 0
    bench "$name" one_engine --device cuda --strict --logs "$folder/logs/$name" "$@"
}

# shellcheck disable=SC2086
bench copies gpu_copy ${GPU_COPIES:-}
run order "$python" -m pytest -q -p no:cacheprovider tests/gpu --timeout 300
exact exact --families llama gemma2 deepseek_v2
# Else each engine tunes its kernels by timing, and two may choose differently.
exact graphs --families llama --faults restart corruption preemption --engine enforce_eager=false \
    'compilation_config={"inductor_compile_config":{"deterministic":true}}'
VLLM_USE_V2_MODEL_RUNNER=0 exact v1 --families llama --faults restart corruption preemption
exact sync --families llama --faults restart preemption --engine async_scheduling=false
engine engine
engine small --rows penstock --host-bytes $((1 << 30)) --lengths 8192 16384 --repetitions 3 \
    --rounds 1 --no-other-process

echo
printf '%s\n' "${summary[@]}" | tee "$folder/summary.txt"
exit "$worst"
