#!/usr/bin/env bash
# The checks, fast ones first; each stage says how long it took. Runs in the repository's root with
# the virtual environment first in PATH, as `make test` and `make lint` arrange it.
#
# Usage: scripts/test.sh all|check|lint|unit
set -euo pipefail

summary=()
trap 'status=$?; printf "\n%s\n" "${summary[@]:-}"; exit $status' EXIT

# All stages together must be done within this many seconds.
whole=5250

# What is tried with older versions of vLLM, where the newest has all tests: a shared pool,
# preemption, blocks given back, a hybrid model, LoRA, KV events. With the oldest also an uneven
# pipeline, and what a router hears of engines.
of_each_version=(
    'tests/e2e/test_sharing.py::test_second_process_loads[file]'
    tests/e2e/test_requests.py::test_preemption_under_a_tiny_kv_cache
    tests/e2e/test_requests.py::test_blocks_of_finished_requests_come_back
    tests/e2e/test_hybrid.py::test_only_the_last_window_is_loaded
    tests/e2e/test_hybrid.py::test_a_damaged_block_of_either_group_is_recomputed
    tests/e2e/test_adapters.py::test_an_adapter_trained_again_under_its_path_never_hits
    tests/e2e/test_kv_events.py
)
of_the_oldest=(
    tests/e2e/test_pipeline_memory.py::test_a_proportional_split_holds_the_sum
    tests/e2e/test_lookup_engines.py
)

# The version that an upgrade to this one starts from: that before the native catalogue.
version_before=f733200

# stage NAME SECONDS COMMAND...: runs the command, for so long at the most. With some=tests it fails
# if none ran, of which cargo says that all went well.
stage() {
    local name=$1 limit=$2 begin=$SECONDS status=0
    shift 2
    if ((limit > whole - SECONDS)); then
        limit=$((whole - SECONDS > 0 ? whole - SECONDS : 1))
    fi
    printf '\n== %s\n' "$name"
    if [[ ${some:-} ]]; then
        timeout --foreground --kill-after=20 "$limit" "$@" |
            awk '{ print; fflush() } /^running [1-9]/ { n = 1 } END { exit !n }' || status=$?
    else
        timeout --foreground --kill-after=20 "$limit" "$@" || status=$?
    fi
    local line
    line=$(printf '%-44s %4d s' "$name" $((SECONDS - begin)))
    case $status in
        0) ;;
        124 | 137) line+="  FAILED: not done after $limit s" ;;
        *) line+="  FAILED: status $status" ;;
    esac
    summary+=("$line")
    return "$status"
}

# Rust tests that had to be skipped pass: what they say of it is at the end of all that is written.
rust_tests() {
    if ! cargo nextest --version >/dev/null 2>&1; then
        stage 'Rust tests' 1200 cargo test --quiet --workspace --locked --no-fail-fast -- \
            --show-output
        return
    fi
    local written=target/nextest/default/junit.xml status=0
    rm -f "$written"
    stage 'Rust tests' 900 cargo nextest run --workspace --locked --no-fail-fast || status=$?
    local said
    while read -r said; do
        summary+=("    $said")
    done < <(grep --no-messages --no-filename --only-matching 'skipped: [^<]*' "$written" | sort | uniq)
    return "$status"
}

lint() {
    stage 'ruff check' 120 ruff check .
    stage 'ruff format' 120 ruff format --check .
    stage 'mypy' 300 mypy
    stage 'native module against its stubs' 300 python -m mypy.stubtest penstock._native
    stage 'who knows whom: rooms, crates, modules' 120 \
        python -m pytest -q tests/docs/test_architecture.py --timeout 60
    # Some 5 s; 15 s if its environment has to be made.
    stage 'site: strict build, links' 300 make --no-print-directory docs
    stage 'cargo fmt' 120 cargo fmt --all --check
    stage 'cargo clippy' 900 cargo clippy --quiet --workspace --all-targets --locked -- -D warnings
}

python_tests=(timeout --kill-after=20 600 python -m pytest -q --ignore tests/e2e
    --ignore tests/packages --ignore tests/sglang --timeout 120)

unit() {
    rust_tests
    stage 'Python tests' 620 "${python_tests[@]}" --numprocesses 2 --dist loadfile
}

# Rust and Python tests beside each other, without those that take long: for whoever waits for them.
check() {
    lint
    local written python begin=$SECONDS status=0 python_status=0
    written=$(mktemp)
    "${python_tests[@]}" -m 'not long' >"$written" 2>&1 &
    python=$!
    rust_tests || status=$?
    wait "$python" || python_status=$?
    printf '\n== Python tests\n'
    cat "$written"
    rm -f "$written"
    summary+=("$(printf '%-44s %4d s' 'Python tests, beside them' $((SECONDS - begin)))")
    if ((python_status)); then
        summary[-1]+="  FAILED: status $python_status"
    fi
    return $((status ? status : python_status))
}

all() {
    stage 'Redis and Valkey servers' 300 scripts/install-servers.sh
    lint
    unit
    # Some 30 s, as the wheel holds what the environment's own build has compiled.
    stage 'packages: used without vLLM and without Rust' 900 \
        python -m pytest -q tests/packages --timeout 600
    some=tests stage 'Rust documentation tests' 600 cargo test --quiet --workspace --locked --doc
    some=tests stage 'models (loom): shared memory' 600 env RUSTFLAGS='--cfg loom' \
        CARGO_TARGET_DIR=target/loom cargo test --quiet -p penstock-store --locked --test shm_loom
    some=tests stage 'models (loom): signals, completions, slots' 600 env RUSTFLAGS='--cfg loom' \
        CARGO_TARGET_DIR=target/loom cargo test --quiet -p penstock-engine --locked --lib loom_models
    # Each fuzz test for so long, two at a time; what they found so far is in the tests above.
    some=tests stage 'fuzzing' 600 env BOLERO_RANDOM_TEST_TIME_MS=8000 \
        cargo test --quiet -p penstock-store --locked --lib fuzz::
    stage 'end-to-end tests with model runner V2' 1200 scripts/model-runner-v2.sh "$VIRTUAL_ENV" \
        python -m pytest -q tests/e2e/test_model_runner_v2.py --timeout 600
    stage 'end-to-end tests with vLLM 0.29.0' 900 scripts/vllm-version.sh "$VIRTUAL_ENV" 0.29.0 \
        python -m pytest -q "${of_each_version[@]}" "${of_the_oldest[@]}" --timeout 600
    stage 'end-to-end tests with vLLM 0.31.0' 900 scripts/vllm-version.sh "$VIRTUAL_ENV" 0.31.0 \
        python -m pytest -q "${of_each_version[@]}" --timeout 600
    # What Penstock uses of 0.30 and of 0.31 is the same. They differ in how steps end that compute
    # nothing.
    stage 'end-to-end tests with vLLM 0.30.0' 900 scripts/vllm-version.sh "$VIRTUAL_ENV" 0.30.0 \
        python -m pytest -q "${of_each_version[0]}" "${of_each_version[2]}" --timeout 600
    stage "rolling upgrade from $version_before" 900 scripts/version-before.sh "$VIRTUAL_ENV" \
        "$version_before" python -m pytest -q tests/e2e/test_rolling_upgrade.py --timeout 600
    # Some 25 s, and what it takes to fetch Mooncake once.
    stage "Mooncake's store" 300 scripts/mooncake.sh "$VIRTUAL_ENV" 0.3.13.post1 \
        python -m pytest -q tests/pool/test_mooncake.py --timeout 200
    stage "vLLM's own proxies and its router" 900 \
        scripts/vllm-examples.sh "$VIRTUAL_ENV" 0.32.0 scripts/vllm-router.sh "$VIRTUAL_ENV" 0.1.17 \
        python -m pytest -q tests/e2e/test_proxies.py tests/e2e/test_router.py --timeout 500
    # Some 60 s: a quarter to install SGLang, the rest mostly to import it, twice.
    stage "SGLang's HiCache: its factory, host pools and threads" 900 \
        scripts/sglang.sh "$VIRTUAL_ENV" 0.5.23 python -m pytest -q tests/sglang --timeout 300
    stage 'end-to-end tests on the real vLLM' 3600 python -m pytest -q tests/e2e \
        -m 'not soak and not alone' --numprocesses 2 --dist loadfile --timeout 900
    stage 'end-to-end tests that measure time' 3600 \
        python -m pytest -q tests/e2e -m 'alone and not soak' --timeout 900
}

case ${1:-} in
    all) all ;;
    check) check ;;
    lint) lint ;;
    unit) unit ;;
    *) printf 'usage: %s all|check|lint|unit\n' "$0" >&2; exit 2 ;;
esac
