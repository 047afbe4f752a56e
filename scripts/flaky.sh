#!/usr/bin/env bash
# Repeats tests, each time in a new process, beside busy loops. A test that fails once in twenty
# times is a defect like any other. Names each test and how often it failed, or was skipped; keeps what
# such runs wrote in target/flaky.
#
# Usage: [TIMES=20] [LOOPS=2] scripts/flaky.sh TEST...
#   LOOPS: 0 if other work keeps all cores busy
#   TEST: what pytest takes (a file, or file::test), or a filter of nextest, such as 'test(=name)'
set -euo pipefail
cd "$(dirname "$0")/.."
export VIRTUAL_ENV=${VIRTUAL_ENV:-$PWD/.venv} PATH=$PWD/.venv/bin:$PATH
times=${TIMES:-20} busy=${LOOPS:-2}
if (($# == 0)); then
    sed -n 's/^# \{0,1\}//p; /^set/q' "$0" >&2
    exit 2
fi

logs=target/flaky
rm -rf "$logs"
mkdir -p "$logs"

# Built before anything runs beside.
for test in "$@"; do
    if [[ $test == *'('* ]]; then
        cargo nextest run --workspace --locked --no-run
        break
    fi
done

loops=()
trap 'kill "${loops[@]}" 2>/dev/null || true' EXIT
for ((loop = 0; loop < busy; loop++)); do
    while :; do :; done &
    loops+=($!)
done

status=0
for test in "$@"; do
    failed=0
    for ((run = 1; run <= times; run++)); do
        log="$logs/$(tr -c '[:alnum:]\n' '_' <<<"$test")-$run.log"
        if [[ $test == *'('* ]]; then
            command=(cargo nextest run --workspace --locked --no-fail-fast -E "$test")
        else
            command=(python -m pytest -q -p no:cacheprovider --timeout 900 "$test")
        fi
        # A test that was skipped shows nothing.
        if "${command[@]}" >"$log" 2>&1 && grep -qE '[1-9][0-9]* passed' "$log"; then
            rm "$log"
        else
            failed=$((failed + 1)) status=1
        fi
    done
    printf '%s: %d of %d runs failed\n' "$test" "$failed" "$times"
done
exit "$status"
