#!/usr/bin/env bash
# Makes what is published: a source distribution, and a wheel for each architecture, which runs on
# Python 3.11 and newer. Then checks all of them. Zig links for an old glibc and for foreign
# architectures, so that any Linux machine makes the same wheels.
#
# Usage: scripts/wheels.sh VENV FOLDER [ARCHITECTURE...]
#
# VENV has requirements/packages.txt. FOLDER is emptied of what earlier runs made. Architectures are
# x86_64 and aarch64; both if none is named.
set -euo pipefail

venv=$(realpath -m "$1") out=$(realpath -m "$2")
shift 2
cd "$(dirname "$0")/.."
export PATH=$venv/bin:$PATH
# maturin keeps the library it packs in the target folder: two builds at a time would mix theirs.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/wheels CARGO_TERM_QUIET=true
if (($#)); then architectures=("$@"); else architectures=(x86_64 aarch64); fi

# The oldest glibc that the wheels run on is this policy's: that of RHEL 8, Debian 10 and Ubuntu 20.04.
policy=manylinux_2_28

for architecture in "${architectures[@]}"; do
    target=$architecture-unknown-linux-gnu
    if [[ ! -d $(rustc --print sysroot)/lib/rustlib/$target/lib ]]; then
        echo "wheels: Rust cannot compile for $target here; run: rustup target add $target" >&2
        exit 1
    fi
done

mkdir -p "$out"
rm -f "$out"/penstock-*.whl "$out"/penstock-*.tar.gz

maturin sdist --out "$out"

for architecture in "${architectures[@]}"; do
    begin=$SECONDS
    # Paths of the machine that builds are no part of what is built.
    RUSTFLAGS="--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo --remap-path-prefix=$PWD=/penstock" \
        maturin build --release --locked --zig \
        --target "$architecture-unknown-linux-gnu" --compatibility "$policy" --out "$out"
    echo "wheels: $architecture built in $((SECONDS - begin)) s"
done

for wheel in "$out"/penstock-*.whl; do
    # What the file's symbols ask for, whatever its name says.
    said=$(auditwheel show "$wheel" | tr '\n' ' ')
    echo "$said" | grep -qE "consistent with the following platform tag: *\"manylinux_2_([0-9]|1[0-9]|2[0-8])_" ||
        { echo "wheels: $wheel does not keep to $policy: $said" >&2; exit 1; }
done
twine check --strict "$out"/penstock-*

(cd "$out" && sha256sum penstock-*)
