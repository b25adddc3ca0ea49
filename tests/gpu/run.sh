#!/usr/bin/env bash
# Runs the GPU tests of an installed tree on a machine with a GPU and writes their reports.
#
#   tests/gpu/run.sh [--part PART] [--budget-s SECONDS] DIST OUT
#
#   PART   conformance  every variant against the oracle, and mutation controls     -> OUT/conformance.json
#          sanitize     compute-sanitizer: memcheck, racecheck, synccheck           -> OUT/sanitize.json
#          e2e          a daemon and other processes, over shared device memory     -> OUT/e2e.json
#          bench        our kernels and their peers in turns                        -> OUT/bench.json
#          all          (default) all of them, in this order
#   DIST   the installed tree: bin/, lib/. It may lie anywhere.
#   OUT    gets the reports above and a log of each part.
#
# The budget (540 s unless given) is for the whole call; a part gets what is left. Exit code 0 = every part asked for ran
# and passed. TESSERA_GIT names the revision in the reports; else the file DIST/GIT does, else this repository.
set -uo pipefail

usage() { sed -n '2,16s/^# \{0,1\}//p' "$0"; }
die() { echo "run.sh: $*" >&2; exit 2; }

part=all
budget=540
places=()
while [ $# -gt 0 ]; do
  case "$1" in
    --part) [ $# -gt 1 ] || die "--part needs a value"; part=$2; shift 2 ;;
    --budget-s) [ $# -gt 1 ] || die "--budget-s needs a value"; budget=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    -*) die "unknown argument $1 (try --help)" ;;
    *) places+=("$1"); shift ;;
  esac
done
[ ${#places[@]} -eq 2 ] || die "expected DIST and OUT (try --help)"
[[ "$budget" =~ ^[1-9][0-9]*$ ]] || die "--budget-s $budget: not a number of seconds"
case "$part" in
  all) parts=(conformance sanitize e2e bench) ;;
  conformance | sanitize | e2e | bench) parts=("$part") ;;
  *) die "unknown part $part (try --help)" ;;
esac
[ -d "${places[0]}/bin" ] || die "${places[0]} is no installed tree: it has no bin/"
dist=$(cd "${places[0]}" && pwd)
mkdir -p "${places[1]}" || die "cannot create ${places[1]}"
out=$(cd "${places[1]}" && pwd)

if [ -z "${TESSERA_GIT:-}" ]; then
  if [ -f "$dist/GIT" ]; then
    TESSERA_GIT=$(head -n 1 "$dist/GIT")
  else
    TESSERA_GIT=$(git -C "$(dirname "$0")" rev-parse --short HEAD 2>/dev/null || echo unknown)
  fi
fi
export TESSERA_GIT
export LD_LIBRARY_PATH="$dist/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

left() { echo $((budget - SECONDS)); }

# What is wrong with the machine, said once and in words; programs that need no nvidia-smi find out for themselves.
if command -v nvidia-smi >/dev/null && ! gpus=$(timeout 60 nvidia-smi -L 2>&1); then
  die "no usable GPU: nvidia-smi says: ${gpus%%$'\n'*}"
fi

# run_program LOG PROGRAM ARGUMENTS...: within the time left; output to the terminal and, its last 4 MiB, to OUT/LOG.
run_program() {
  local log=$1 status
  shift
  [ -x "$1" ] || { echo "run.sh: $1 is not in this tree" | tee "$out/$log" >&2; return 2; }
  [ "$(left)" -gt 0 ] || { echo "run.sh: no time is left for $1" | tee "$out/$log" >&2; return 124; }
  timeout --kill-after=10 "$(left)" "$@" 2>&1 | tee "$scratch/$log"
  status=${PIPESTATUS[0]}
  tail -c 4194304 "$scratch/$log" >"$out/$log"
  return "$status"
}

run_conformance() {
  run_program conformance.log "$dist/bin/tessera-gpu-conformance" --json "$out/conformance.json" \
    --budget-s "$(($(left) > 15 ? $(left) - 10 : 5))"
}

run_e2e() { run_program e2e.log "$dist/bin/tessera-gpu-e2e" --json "$out/e2e.json" --dist "$dist"; }
run_bench() { run_program bench.log "$dist/bin/tessera-gpu-bench" --json "$out/bench.json" --dist "$dist"; }

find_sanitizer() {
  local candidate
  for candidate in "$(command -v compute-sanitizer)" "$dist/bin/compute-sanitizer" \
                   "$dist/lib/compute-sanitizer/compute-sanitizer" /usr/local/cuda/bin/compute-sanitizer \
                   /usr/local/cuda/compute-sanitizer/compute-sanitizer; do
    [ -n "$candidate" ] && [ -x "$candidate" ] && echo "$candidate" && return
  done
  return 1
}

# The number that ends the tool's report, or -1 if there is none: the program did not get that far.
errors_in() {
  local summary
  summary=$(grep -oE '(ERROR SUMMARY: [0-9]+|RACECHECK SUMMARY: [0-9]+ hazards? displayed \([0-9]+)' "$1" | tail -n 1)
  [[ "$summary" =~ ([0-9]+)$ ]] && echo "${BASH_REMATCH[1]}" || echo -1
}

run_sanitize() {
  local sanitizer tool share begin status errors rows=() failed=0 tools=(memcheck racecheck synccheck) index=0
  : >"$out/sanitize.log"
  if ! sanitizer=$(find_sanitizer); then
    echo "run.sh: compute-sanitizer is neither in PATH nor in the CUDA toolkit nor in $dist" >&2
    printf '{"git": "%s", "error": "compute-sanitizer not found", "tools": []}\n' "$TESSERA_GIT" >"$out/sanitize.json"
    return 2
  fi
  for tool in "${tools[@]}"; do
    # An equal share of what is left, so that a slow tool does not take another's time.
    share=$(($(left) / (${#tools[@]} - index++)))
    [ "$share" -gt 0 ] || share=1
    begin=$SECONDS
    timeout --kill-after=10 "$share" "$sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 40 \
      "$dist/bin/tessera-gpu-conformance" --reduced --no-vendor --threads 2 >"$scratch/$tool.log" 2>&1
    status=$?
    errors=$(errors_in "$scratch/$tool.log")
    { echo "== $tool: exit code $status"; tail -c 1048576 "$scratch/$tool.log"; } >>"$out/sanitize.log"
    [ "$status" = 0 ] && [ "$errors" = 0 ] || { failed=1; tail -n 30 "$scratch/$tool.log" >&2; }
    echo "$tool: $errors errors, exit code $status, $((SECONDS - begin)) s"
    rows+=("$(printf '{"tool": "%s", "errors": %d, "exit_code": %d, "timed_out": %s, "seconds": %d}' "$tool" "$errors" \
      "$status" "$([ "$status" = 124 ] && echo true || echo false)" "$((SECONDS - begin))")")
  done
  printf '{"git": "%s", "sanitizer": "%s", "tools": [\n  %s,\n  %s,\n  %s\n]}\n' "$TESSERA_GIT" \
    "$("$sanitizer" --version 2>/dev/null | grep -oE 'Version [0-9.]+' | head -n 1)" "${rows[@]}" >"$out/sanitize.json"
  return "$failed"
}

scratch=$(mktemp -d "${TMPDIR:-/tmp}/tessera-gpu.XXXXXX") || die "cannot create a temporary folder"
trap 'rm -rf "$scratch"' EXIT

exit_code=0
for one in "${parts[@]}"; do
  begin=$SECONDS
  "run_$one"
  status=$?
  case "$status" in
    0) verdict=passed ;;
    124 | 137) verdict="FAILED: out of time" ;;
    *) verdict="FAILED: exit code $status" ;;
  esac
  echo "part $one: $verdict, $((SECONDS - begin)) s"
  [ "$status" = 0 ] || exit_code=1
done
exit "$exit_code"
