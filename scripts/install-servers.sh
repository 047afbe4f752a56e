#!/bin/sh
# Installs redis-server and valkey-server from the distribution's packages, for the tests, the demo
# and the benchmarks, which start their own servers and stop them again; prometheus, for the tests of
# the dashboard; curl, which the quick start uses; and sshfs, for a directory that several hosts mount.
#
# Where the release itself has no Valkey (Debian 12), its backports are used for this one package;
# the source entry is derived from the machine's own and lives only while this script runs. Services
# that a fresh install would start are kept from starting and are disabled; servers that were
# installed before are left as they are. Runs as root or with sudo; running it again is harmless.
#
# Exit status: 0 if both servers are there at the end, 3 if one is missing, else apt's.
set -eu

say() { printf 'install-servers: %s\n' "$*" >&2; }
has() { command -v "$1" >/dev/null 2>&1; }

if has redis-server && has valkey-server && has prometheus && has curl && has sshfs; then
    say "redis-server, valkey-server, prometheus, curl and sshfs are installed already"
    exit 0
fi
has apt-get || { say "no apt-get here: install redis-server and valkey-server by hand"; exit 3; }

if [ "$(id -u)" -eq 0 ]; then
    root() { "$@"; }
elif has sudo; then
    root() { sudo "$@"; }
else
    say "needs root or sudo to install packages"
    exit 3
fi

scratch=$(mktemp -d)
policy=/usr/sbin/policy-rc.d
policy_is_ours=no
finish() {
    if [ "$policy_is_ours" = yes ]; then root rm -f "$policy"; fi
    rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 130' INT TERM

# Debian asks policy-rc.d before a package's scripts start a service; 101 means "do not".
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$scratch/policy-rc.d"
    root install -m 755 "$scratch/policy-rc.d" "$policy"
    policy_is_ours=yes
fi

# apt SOURCES COMMAND...: apt-get with the given folder of source entries ("" for the system's own).
apt() {
    sources=$1
    shift
    if [ -n "$sources" ]; then
        set -- -o "Dir::Etc::SourceParts=$sources" "$@"
    fi
    root env DEBIAN_FRONTEND=noninteractive apt-get -q -y "$@" >&2
}

has_candidate() {
    apt-cache policy "$1" 2>/dev/null | grep -q 'Candidate: [^(]'
}

keep_stopped() {
    if [ -d /run/systemd/system ]; then
        root systemctl disable --now "$1" >/dev/null 2>&1 || true
    elif has update-rc.d; then
        root update-rc.d "$1" disable >/dev/null 2>&1 || true
    fi
}

# Writes to $scratch/sources the system's entries and, from the one that names this release, one for
# its backports. Fails if none names it.
derive_backports() {
    codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
    [ -n "$codename" ] || return 1
    mkdir -p "$scratch/sources"
    chmod 755 "$scratch" "$scratch/sources"
    for entry in /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list; do
        if [ -e "$entry" ]; then cp "$entry" "$scratch/sources/"; fi
    done
    backports="$scratch/sources/penstock-backports"
    if [ -e /etc/apt/sources.list.d/debian.sources ]; then
        awk -v codename="$codename" '
            BEGIN { RS = ""; FS = "\n" }
            $0 ~ "\nSuites:[^\n]*[ \t]" codename "([ \t\n]|$)" && !taken {
                taken = 1
                for (i = 1; i <= NF; i++) {
                    if ($i ~ /^#/) continue
                    if ($i ~ /^Suites:/) $i = "Suites: " codename "-backports"
                    print $i
                }
            }' /etc/apt/sources.list.d/debian.sources >"$backports.sources"
        [ -s "$backports.sources" ]
    else
        awk -v codename="$codename" '
            $1 == "deb" && !taken {
                for (i = 2; i <= NF; i++) if ($i == codename) {
                    taken = 1
                    $i = codename "-backports"
                    print
                    break
                }
            }' /etc/apt/sources.list >"$backports.list" 2>/dev/null
        [ -s "$backports.list" ]
    fi
}

install_redis() {
    has redis-server && return 0
    say "installing redis-server"
    apt "" install --no-install-recommends redis-server || return 1
    keep_stopped redis-server
}

install_valkey() {
    has valkey-server && return 0
    if has_candidate valkey-server; then
        say "installing valkey-server"
        apt "" install --no-install-recommends valkey-server || return 1
    else
        say "this release has no valkey-server: trying its backports"
        derive_backports || { say "found no source entry to derive the backports from"; return 1; }
        apt "$scratch/sources" update || return 1
        apt "$scratch/sources" install --no-install-recommends -t "$codename-backports" \
            valkey-server || return 1
    fi
    keep_stopped valkey-server
}

install_prometheus() {
    has prometheus && return 0
    say "installing prometheus"
    apt "" install --no-install-recommends prometheus || return 1
    keep_stopped prometheus
}

install_curl() {
    has curl && return 0
    say "installing curl"
    apt "" install --no-install-recommends curl
}

install_sshfs() {
    has sshfs && return 0
    say "installing sshfs"
    apt "" install --no-install-recommends sshfs openssh-sftp-server
}

apt "" update
install_redis || true
install_valkey || true
install_prometheus || true
install_curl || true
install_sshfs || true

missing=
for server in redis-server valkey-server; do
    if has "$server"; then
        say "$("$server" --version)"
    else
        missing="$missing $server"
    fi
done
if [ -n "$missing" ]; then
    say "could not be installed:$missing (apt's reasons are above)." \
        "What needs it is skipped, and says so; without either server it fails."
    exit 3
fi
