#!/usr/bin/env bash
# Configures and builds one preset:  tools/build.sh [PRESET] [TARGET...]     (default: cpu, everything)
# Quiet while it works; the log is build/PRESET/build.log and is shown on failure.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  -h | --help) sed -n '2,3s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac

preset=${1:-cpu}
[ $# -gt 0 ] && shift
mkdir -p "build/$preset"
log="build/$preset/build.log"
targets=()
[ $# -gt 0 ] && targets=(--target "$@")

# Everything goes to the log; a terminal also sees the current step on one line.
show() {
  if [ -t 1 ]; then
    tee "$log" | while IFS= read -r line; do printf '\r\033[K%.100s' "$line"; done
    printf '\r\033[K'
  else
    cat >"$log"
  fi
}

start=$SECONDS
echo "building preset $preset, minutes if from nothing (log: $log)"
if ! { cmake --preset "$preset" && cmake --build --preset "$preset" -j "${TESSERA_JOBS:-$(nproc)}" "${targets[@]}"; } 2>&1 | show; then
  grep -nE -A4 'CMake Error|error:|FAILED' "$log" | head -40 >&2 || tail -30 "$log" >&2
  echo "build failed; see $log" >&2
  exit 1
fi
echo "built in $((SECONDS - start)) s"
