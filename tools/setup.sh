#!/usr/bin/env bash
# Installs what building and testing ebb needs on Debian or Ubuntu; does nothing where it is there.
#   bash tools/setup.sh            EBB_SETUP=off skips it, EBB_OPTIONAL=off leaves out optional ones
set -euo pipefail
case "${1:-}" in
  "") ;;
  -h | --help) sed -n '2,3s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) echo "setup: unknown option $1; --help says what there is" >&2; exit 2 ;;
esac

# PROGRAM:PACKAGE (fine wherever the program comes from), then libraries by package.
programs=(cmake:cmake ninja:ninja-build g++:g++ ccache:ccache clang-format:clang-format git:git)
libraries=(libopenblas-dev libfmt-dev nlohmann-json3-dev libgtest-dev)
optional=(libzstd-dev zlib1g-dev libsentencepiece-dev libpcre2-dev libopenmpi-dev)

installed() { [[ "$(dpkg-query -W -f='${Status}' "$1" 2>/dev/null)" == "install ok installed" ]]; }
missing_required() {
  local entry
  for entry in "${programs[@]}"; do
    command -v "${entry%%:*}" >/dev/null || echo "${entry#*:}"
  done
  for entry in "${libraries[@]}"; do installed "$entry" || echo "$entry"; done
}
missing_optional() {
  local entry
  [[ "${EBB_OPTIONAL:-on}" == off ]] && return
  for entry in "${optional[@]}"; do installed "$entry" || echo "$entry"; done
}
as_root() {
  if [[ "$(id -u)" == 0 ]]; then
    DEBIAN_FRONTEND=noninteractive "$@"
  elif command -v sudo >/dev/null; then
    sudo env DEBIAN_FRONTEND=noninteractive "$@"
  else
    echo "setup: not root, and no sudo here; run as root: $*" >&2
    return 1
  fi
}
apt_install() { as_root apt-get install -y -q --no-install-recommends "$@"; }

[[ "${EBB_SETUP:-on}" == off ]] && exit 0
if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
  for entry in "${programs[@]}"; do
    command -v "${entry%%:*}" >/dev/null || echo "setup: ${entry%%:*} is missing" >&2
  done
  echo "setup: no apt here; install yourself what docs/dependencies.md lists"
  exit 0
fi
mapfile -t required < <(missing_required)
mapfile -t extra < <(missing_optional)
if (( ${#required[@]} + ${#extra[@]} > 0 )); then
  (( ${#required[@]} )) && echo "setup: installing ${required[*]}"
  (( ${#extra[@]} )) && echo "setup: installing (optional) ${extra[*]}"
  as_root apt-get update -q || echo "setup: apt-get update failed, trying with the lists at hand" >&2
  if (( ${#required[@]} )); then apt_install "${required[@]}"; fi
  for package in "${extra[@]}"; do
    apt_install "$package" || echo "setup: $package not installed, its feature stays off" >&2
  done
fi
version=$(cmake --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')
if [[ "$(printf '%s\n' 3.25 "$version" | sort -V | head -1)" != 3.25 ]]; then
  echo "setup: cmake $version is too old, ebb needs 3.25 (Debian 12, Ubuntu 24.04 or newer)" >&2
  exit 1
fi
