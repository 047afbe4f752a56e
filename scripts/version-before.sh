#!/usr/bin/env bash
# Runs a command with the version of Penstock that an upgrade starts from: its Python package is in
# the folder that PENSTOCK_TEST_BEFORE names. It is built from the repository's history, once.
#
# Usage: scripts/version-before.sh VENV COMMIT COMMAND [ARGUMENT...]
set -euo pipefail

venv=$1 commit=$2
shift 2
folder=$(realpath -m "$venv")/penstock-$commit

if [[ ! -e $folder/.done ]]; then
    if ! git cat-file -e "$commit^{commit}" 2>/dev/null; then
        printf 'skipped: an upgrade from %s, as this checkout has not its history\n' "$commit" >&2
        exit 0
    fi
    source=$(mktemp -d)
    trap 'rm -rf "$source"' EXIT
    git archive "$commit" | tar --extract --directory "$source"
    # Another version, or Cargo would take what is built here for today's crates in later builds.
    sed -i '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/version = "\1+before"/' \
        "$source/Cargo.toml"
    sed -i '/^name = "penstock-/{n;s/"$/+before"/}' "$source/Cargo.lock"
    # A debug build: what it depends on is mostly built already, for today's tests. They do not use
    # the library that is made here.
    target=${CARGO_TARGET_DIR:-$PWD/target}
    (cd "$source" && CARGO_TARGET_DIR=$target \
        cargo build --quiet --locked --package penstock-py --features pyo3/extension-module)
    rm -rf "$folder"
    cp -r "$source/python" "$folder"
    cp "$target/debug/lib_native.so" "$folder/penstock/_native.abi3.so"
    touch "$folder/.done"
fi

export PENSTOCK_TEST_BEFORE=$folder
exec "$@"
