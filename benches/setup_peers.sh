#!/bin/sh
# Makes .venv-bench: the peers of benches/peers.txt on top of .venv, which is only read. Run it from
# anywhere, after `make` has made .venv and installed Penstock there; running it again is harmless.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
venv=$root/.venv-bench
cd "$root"

[ -x .venv/bin/python ] || { echo "setup_peers: no .venv here: run make first" >&2; exit 1; }
[ -x "$venv/bin/python" ] || .venv/bin/python -m venv --without-pip "$venv"

# Mooncake's programs link to the RDMA libraries even where they only use TCP.
if ! ldconfig -p | grep -q libibverbs.so.1; then
    if [ "$(id -u)" -eq 0 ]; then
        apt-get update -q >&2
        apt-get install -q -y --no-install-recommends libibverbs1 librdmacm1 libnuma1 >&2
    else
        echo "setup_peers: Mooncake needs libibverbs1, librdmacm1 and libnuma1" >&2
    fi
fi

# addsitedir, unlike a plain path, also reads the .pth files of .venv (an editable Penstock is one).
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
echo "import site; site.addsitedir('$(packages .venv/bin/python)')" \
    >"$(packages "$venv/bin/python")/penstock-venv.pth"

sh scripts/uv.sh .venv pip install --quiet --python "$venv/bin/python" --no-deps \
    -r benches/peers.txt
