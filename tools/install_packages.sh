#!/usr/bin/env bash
# Installs what building, testing and formatting need, from the distribution's packages. Does nothing where all of it is
# there; without root it prints the command that an administrator would run.
#
#   tools/install_packages.sh            build and test
#   tools/install_packages.sh --all      and lint and fuzz, for tools/test.sh --all
#   tools/install_packages.sh --check    only say what of the first is missing (exit 1 if anything is)
set -euo pipefail

case "${1:-}" in
  "" | --all | --check) ;;
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) echo "install_packages: unknown argument $1 (try --help)" >&2; exit 2 ;;
esac

packages=(
  g++ cmake ninja-build python3 ca-certificates openssl
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev libssl-dev
  libboost-dev prometheus-cpp-dev libspdlog-dev libyaml-cpp-dev libcli11-dev nlohmann-json3-dev
  libgtest-dev libgmock-dev libbenchmark-dev
  clang-format-16
)
[ "${1:-}" = "--all" ] && packages+=(clang-tidy-16 clang-16 libclang-rt-16-dev)

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  [ "$status" = "install ok installed" ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "${1:-}" = "--check" ]; then
  echo "missing packages: ${missing[*]}"
  exit 1
fi
if ! command -v apt-get >/dev/null; then
  echo "tessera: this script knows Debian 12's packages only; install the equivalents of: ${missing[*]}" >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "tessera: not root; have an administrator run:  apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
echo "installing ${#missing[@]} packages, about half a minute"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
