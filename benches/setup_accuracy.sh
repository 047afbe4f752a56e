#!/bin/sh
# Installs lm-eval of benches/accuracy.txt into target/lm-eval, which benches.accuracy alone looks
# into. .venv is only read. Run it from anywhere, after `make` has made .venv; running it again is
# harmless.
set -eu

cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] || { echo "setup_accuracy: no .venv here: run make first" >&2; exit 1; }

sh scripts/uv.sh .venv pip install --quiet --python .venv/bin/python --no-deps \
    --target target/lm-eval -r benches/accuracy.txt
