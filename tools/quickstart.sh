#!/usr/bin/env bash
# From nothing to a daemon that computes: installs packages, builds, starts tesserad, pushes a checked workload through it
# from another process, shows what the daemon says about it, shuts down.
#
#   tools/quickstart.sh             exit 0 = every result was right
#   tools/quickstart.sh --corrupt   one result is damaged on purpose; exit code must be non-zero
#   tools/quickstart.sh --keep      leaves the daemon running
#
# Without root: have an administrator run tools/install_packages.sh once; everything else needs no privileges.
set -euo pipefail
cd "$(dirname "$0")/.."

workload_args=()
keep=0
for argument in "$@"; do
  case "$argument" in
    --corrupt) workload_args+=(--corrupt) ;;
    --keep) keep=1 ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "quickstart: unknown argument $argument (try --help)" >&2; exit 2 ;;
  esac
done

tools/install_packages.sh
tools/build.sh cpu tesserad tessera tessera-workload
build=build/cpu

run=$(mktemp -d "${TMPDIR:-/tmp}/tessera-quickstart.XXXXXX")
chmod 750 "$run"
export TESSERA_SOCKET="$run/tessera.sock"
"$build/server/tesserad" --http-address 127.0.0.1:0 2>"$run/tesserad.log" &
daemon=$!

stop() {
  [ "$keep" = 1 ] && return
  kill -TERM "$daemon" 2>/dev/null || true
  wait "$daemon" 2>/dev/null || true
  rm -rf "$run"
}
trap stop EXIT

for _ in $(seq 100); do
  "$build/client/cli/tessera" status >/dev/null 2>&1 && break
  kill -0 "$daemon" 2>/dev/null || { cat "$run/tesserad.log" >&2; exit 1; }
  sleep 0.1
done

"$build/client/cli/tessera" status
echo
outcome=0
"$build/tests/workload/tessera-workload" "${workload_args[@]}" || outcome=$?
echo
for prefix in tessera_planner_decisions tessera_kernel_launches tessera_flops tessera_operations tessera_buffer; do
  "$build/client/cli/tessera" metrics "$prefix" 2>/dev/null | sed -n '2,4p'  # reads all: no SIGPIPE
done

if [ "$keep" = 1 ]; then
  echo
  echo "the daemon keeps running (pid $daemon); talk to it with:"
  echo "  export TESSERA_SOCKET=$TESSERA_SOCKET"
  echo "  $build/client/cli/tessera gemm --check"
  echo "  $build/client/cli/tessera drain      # ends it; its log stays in $run"
  tools/gpu_notice.sh
  exit "$outcome"
fi

kill -TERM "$daemon"
drained=0
wait "$daemon" || drained=$?
trap - EXIT
echo
if [ "$drained" -ne 0 ]; then
  cat "$run/tesserad.log" >&2
  echo "tesserad exited with $drained" >&2
  outcome=1
else
  echo "tesserad drained and exited 0"
fi
rm -rf "$run"
tools/gpu_notice.sh
if [ "$outcome" -eq 0 ]; then echo "quickstart: all results right"; else echo "quickstart: FAILED"; fi
exit "$outcome"
