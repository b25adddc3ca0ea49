#!/usr/bin/env bash
# Builds and runs the tests.
#
#   tools/test.sh          unit and end-to-end tests on the cpu backend; at most 10 minutes from nothing
#   tools/test.sh --all    what CI runs: these, formatting, lint, the suite under AddressSanitizer, concurrency under
#                          ThreadSanitizer, a minute of fuzzing, the quick start both ways; under an hour on two cores
#
# Without root: have an administrator run tools/install_packages.sh once; everything else needs no privileges.
set -euo pipefail
cd "$(dirname "$0")/.."

all=0
for argument in "$@"; do
  case "$argument" in
    --all) all=1 ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "test: unknown argument $argument (try --help)" >&2; exit 2 ;;
  esac
done

if [ "$all" = 1 ]; then
  tools/install_packages.sh --all
  tools/format.sh --check
else
  tools/install_packages.sh
fi
if [ "$all" = 1 ]; then
  # Device code is compiled wherever there is a compiler for it; running it takes a GPU (tests/gpu/run.sh).
  export TESSERA_CUDA_ARCHS=${TESSERA_CUDA_ARCHS:-90a}
fi
tools/build.sh cpu
# The disassembler that reads device code, where the toolkit came without.
if [ "$all" = 1 ] && grep -q '^TESSERA_CUDA:INTERNAL=ON' build/cpu/CMakeCache.txt; then tools/sass_digest.py --install; fi
grep -h -- '-- CUDA:' build/cpu/build.log
ctest --preset cpu -j "$(nproc)"

if [ "$all" = 1 ]; then
  if grep -q '^TESSERA_CUDA:INTERNAL=ON' build/cpu/CMakeCache.txt; then
    tools/check_device_code.py --self-test
    find build/cpu/kernels -name '*.cu.o.ptxas' -exec cat {} + >build/cpu/ptxas.log
    find build/cpu/kernels -name '*.cu.o' -exec tools/check_device_code.py build/cpu/ptxas.log {} +
  fi
  tools/lint.sh
  tools/sanitize.sh address
  tools/sanitize.sh thread
  tools/fuzz.sh
  echo "quick start, then quick start with a damaged result"
  tools/quickstart.sh >build/quickstart.log 2>&1 || { tail -20 build/quickstart.log; exit 1; }
  tail -8 build/quickstart.log
  corrupt=0
  tools/quickstart.sh --corrupt >build/quickstart-corrupt.log 2>&1 || corrupt=$?
  if [ "$corrupt" -ne 1 ] || ! grep -q '240 right, 1 wrong' build/quickstart-corrupt.log; then
    tail -20 build/quickstart-corrupt.log >&2
    echo "quickstart.sh --corrupt exited $corrupt: it must find exactly the damaged result and exit 1" >&2
    exit 1
  fi
  echo "quickstart.sh --corrupt found the damaged result and exited 1"
fi
tools/gpu_notice.sh
