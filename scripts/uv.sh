#!/bin/sh
# Runs uv with the package index, certificate and wheel folder that pip is configured with, so that a
# machine needs to be set up once. What uv's own variables say stands.
#
# Usage: scripts/uv.sh VENV UV_ARGUMENT...
set -eu

venv=$1
shift

# pip's setting NAME, from its environment variable or its configuration files; empty if unset.
pip_setting() {
    variable=PIP_$(printf %s "$1" | tr a-z- A-Z_)
    eval "value=\${$variable:-}"
    [ -n "$value" ] || value=$("$venv/bin/pip" config get "global.$1" 2>/dev/null) || value=
    printf %s "$value" | tr '\n' ' '
}

export_unless_set() {
    eval "current=\${$1:-}"
    if [ -z "$current" ] && [ -n "$2" ]; then
        export "$1=$2"
    fi
}

# UV_INDEX_URL is the older name of UV_DEFAULT_INDEX; uv reads both, the newer first.
if [ -z "${UV_INDEX_URL:-}" ]; then
    export_unless_set UV_DEFAULT_INDEX "$(pip_setting index-url)"
fi
export_unless_set UV_INDEX "$(pip_setting extra-index-url)"
export_unless_set UV_FIND_LINKS "$(pip_setting find-links | tr ' ' ',' | sed 's/,*$//')"
export_unless_set SSL_CERT_FILE "$(pip_setting cert)"
export_unless_set UV_HTTP_TIMEOUT 180

exec "$venv/bin/uv" "$@"
