#!/usr/bin/env bash
# Repeats tests, each time in a new process and another order, beside busy loops. A test that fails
# once in twenty times is a defect like any other. Names each test and how often it failed, or was
# skipped; keeps what such runs wrote in target/flaky, with the order at the top.
#
# Usage: [TIMES=20] [LOOPS=2] scripts/flaky.sh TEST...
#        [TIMES=20] [LOOPS=2] scripts/flaky.sh --since COMMIT
#   LOOPS: 0 if other work keeps all cores busy
#   TEST: what pytest takes (a file, or file::test), or a filter of nextest, such as 'test(=name)'
#   COMMIT: all test files that have changed since then; those that need an environment of their own
#     are named, and left out
set -euo pipefail
cd "$(dirname "$0")/.."
export VIRTUAL_ENV=${VIRTUAL_ENV:-$PWD/.venv} PATH=$PWD/.venv/bin:$PATH
times=${TIMES:-20} busy=${LOOPS:-2}

# Writes what repeats the tests in a file that has changed. Nothing if it has none.
test_of() {
    local crate=${1#crates/} name
    crate=${crate%%/*} name=$(basename "$1" .rs)
    case $1 in
        tests/sglang/* | tests/gpu/* | tests/pool/test_mooncake.py | tests/e2e/test_proxies.py | \
            tests/e2e/test_model_runner_v2.py | tests/e2e/test_rolling_upgrade.py | \
            tests/e2e/test_router.py)
            echo "left out: $1" >&2 ;;
        tests/test_*.py | tests/*/test_*.py) echo "$1" ;;
        crates/*/src/*tests*.rs | crates/*/src/loom_models.rs | crates/*/src/*fuzz*.rs)
            echo "package($crate) and kind(lib)" ;;
        crates/*/src/* | crates/*/tests/*/* | crates/*/tests/main.rs) ;;
        # A file is a program, or a module of the program of all.
        crates/*/tests/*.rs) echo "package($crate) and (binary(=$name) or test(/^$name::/))" ;;
    esac
}

if [[ ${1-} == "--since" && $# == 2 ]]; then
    git rev-parse --quiet --verify "$2^{commit}" >/dev/null || { echo "no commit: $2" >&2; exit 2; }
    mapfile -t changed < <(git diff --name-only --diff-filter=d "$2" -- tests crates)
    mapfile -t tests < <(for file in "${changed[@]}"; do test_of "$file"; done | sort -u)
    set -- "${tests[@]}"
    (($#)) || { echo "no test file has changed"; exit; }
elif (($# == 0)) || [[ $1 == -* ]]; then
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
            command=(python -m pytest -p no:cacheprovider --timeout 900 "$test")
        fi
        # A test that was skipped shows nothing.
        if PENSTOCK_TEST_ORDER=$run "${command[@]}" >"$log" 2>&1 &&
            grep -qE '[1-9][0-9]* passed' "$log"; then
            rm "$log"
        else
            failed=$((failed + 1)) status=1
        fi
    done
    printf '%s: %d of %d runs failed\n' "$test" "$failed" "$times"
done
exit "$status"
