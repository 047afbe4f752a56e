#!/usr/bin/env bash
# Runs a command on a machine that seems to have a CUDA device: the stand-in for the driver is found as
# libcuda.so.1, and vLLM's CPU build has a plug-in by which Penstock takes its KV cache for the device's.
#
# Run it in the repository's root. Usage: scripts/cuda-standin.sh COMMAND [ARGUMENT...]
set -euo pipefail

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
cargo build --quiet --locked -p penstock-cuda-standin
mkdir -p "$target/cuda-standin"
ln -sf "$target/debug/libpenstock_cuda_standin.so" "$target/cuda-standin/libcuda.so.1"

export PENSTOCK_STANDIN_DEVICES=1
export LD_LIBRARY_PATH=$target/cuda-standin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONPATH=$PWD/tests/standin${PYTHONPATH:+:$PYTHONPATH}
exec "$@"
