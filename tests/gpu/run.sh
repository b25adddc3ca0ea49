#!/usr/bin/env bash
# Runs the GPU tests of an installed tree on a machine with a GPU and writes their reports.
#
#   tests/gpu/run.sh [--part PART] [--budget-s SECONDS] DIST OUT [-- ARGUMENTS]
#
#   PART   conformance  every variant against the oracle, and mutation controls     -> OUT/conformance.json
#          sanitize     compute-sanitizer: memcheck, racecheck, synccheck           -> OUT/sanitize.json
#          e2e          a daemon and other processes, over shared device memory     -> OUT/e2e.json
#          isolation    what sharing the GPU costs and risks, with MPS and without  -> OUT/isolation.jsonl
#          bench        what a call costs on its way                                -> OUT/launch.jsonl
#                       and on a GPU between kernels of the client's                -> OUT/handover.jsonl
#                       our kernels and cuBLASLt's in turns                         -> OUT/gemm_vendor.jsonl
#          all          (default) all of the above, in this order
#          gemm         GEMM over a grid of sizes beside cuBLASLt, minutes          -> OUT/gemm.jsonl
#   DIST   the installed tree: bin/, lib/, of the components gpu_tests and, for e2e, isolation and bench, tessera.
#   OUT    gets the reports above, and run.log with what the parts printed.
#   ARGUMENTS  for the program of the part gemm, such as --family bf16,int8 --merge (tessera-gpu-bench-gemm --help)
#
# e2e makes PID namespaces and starts MPS of its own, isolation starts MPS and becomes another user: they need root,
# CAP_SYS_ADMIN and nvidia-cuda-mps-control in PATH; TESSERA_ALLOW_SKIP=1 lets them, and bench, leave out what the
# machine cannot do.
#
# The budget (540 s unless given) is for all; a part gets what is left. Exit code 0 = every part asked for ran
# and passed. TESSERA_GIT names the revision in the reports; else the file DIST/GIT does, else this repository.
set -uo pipefail

usage() { sed -n '2,25s/^# \{0,1\}//p' "$0"; }
die() { echo "run.sh: $*" >&2; exit 2; }

part=all
budget=540
places=()
arguments=()
while [ $# -gt 0 ]; do
  case "$1" in
    --part) [ $# -gt 1 ] || die "--part needs a value"; part=$2; shift 2 ;;
    --budget-s) [ $# -gt 1 ] || die "--budget-s needs a value"; budget=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    --) shift; arguments=("$@"); break ;;
    -*) die "unknown argument $1 (try --help)" ;;
    *) places+=("$1"); shift ;;
  esac
done
[ ${#places[@]} -eq 2 ] || die "expected DIST and OUT (try --help)"
[[ "$budget" =~ ^[1-9][0-9]*$ ]] || die "--budget-s $budget: not a number of seconds"
case "$part" in
  all) parts=(conformance sanitize e2e isolation bench) ;;
  conformance | sanitize | e2e | isolation | bench | gemm) parts=("$part") ;;
  *) die "unknown part $part (try --help)" ;;
esac
[ ${#arguments[@]} -eq 0 ] || [ "$part" = gemm ] || die "only part gemm takes arguments (try --help)"
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

# cuBLASLt, which the vendor's variants load: the loader's own, else a toolkit's, else that of a Python wheel.
find_cublaslt() {
  local name=libcublasLt.so.13 folder folders=() found
  IFS=: read -ra folders <<<"$LD_LIBRARY_PATH"
  for folder in "${folders[@]}"; do
    [ -n "$folder" ] && [ -e "$folder/$name" ] && echo "$folder/$name" && return
  done
  found=$(ldconfig -p 2>/dev/null | awk -v name="$name" '$1 == name { print $NF; exit }')
  [ -n "$found" ] && echo "$found" && return
  mapfile -t folders < <(python3 -c 'import sys; print("\n".join(path for path in sys.path if path))' 2>/dev/null)
  for found in /usr/local/cuda*/lib64/$name /usr/local/cuda*/targets/*/lib/$name \
               "${folders[@]/%//nvidia/cu13/lib/$name}" "${folders[@]/%//nvidia/cublas/lib/$name}"; do
    [ -e "$found" ] && echo "$found" && return
  done
  return 1
}

if cublaslt=$(find_cublaslt); then
  # Last, so that nothing else of that folder takes the place of what was found before.
  export LD_LIBRARY_PATH="$LD_LIBRARY_PATH:${cublaslt%/*}"
  echo "cuBLASLt: $cublaslt"
else
  echo "cuBLASLt: none found; the vendor's variants are left out"
fi

left() { echo $((budget - SECONDS)); }
# For programs that stop by themselves, in order, before the time is over.
left_for_program() { echo $(($(left) > 25 ? $(left) - 20 : 5)); }

# What is wrong with the machine, said once and in words; programs that need no nvidia-smi find out for themselves.
if command -v nvidia-smi >/dev/null && ! gpus=$(timeout 60 nvidia-smi -L 2>&1); then
  die "no usable GPU: nvidia-smi says: ${gpus%%$'\n'*}"
fi

# run_program PROGRAM ARGUMENTS...: within the time left; output to the terminal and, its last 4 MiB, to OUT/run.log.
run_program() {
  local status
  [ -x "$1" ] || { echo "run.sh: $1 is not in this tree" | tee -a "$out/run.log" >&2; return 2; }
  [ "$(left)" -gt 0 ] || { echo "run.sh: no time is left for $1" | tee -a "$out/run.log" >&2; return 124; }
  timeout --kill-after=10 "$(left)" "$@" 2>&1 | tee "$scratch/log"
  status=${PIPESTATUS[0]}
  { echo "== $1"; tail -c 4194304 "$scratch/log"; } >>"$out/run.log"
  return "$status"
}

run_conformance() {
  run_program "$dist/bin/tessera-gpu-conformance" --json "$out/conformance.json" \
    --budget-s "$(($(left) > 15 ? $(left) - 10 : 5))"
}

allow_skip=()
[ "${TESSERA_ALLOW_SKIP:-}" = 1 ] && allow_skip=(--allow-skip)

run_e2e() {
  run_program "$dist/bin/tessera-gpu-e2e" --json "$out/e2e.json" --dist "$dist" \
    --budget-s "$(left_for_program)" "${allow_skip[@]}"
}

# At most some of the time, so that one that hangs leaves bench its own.
run_isolation() {
  local seconds
  seconds=$(left_for_program)
  run_program "$dist/bin/tessera-gpu-isolation" --json "$out/isolation.jsonl" --dist "$dist" \
    --budget-s "$((seconds < 150 ? seconds : 150))" "${allow_skip[@]}"
}

run_bench() {
  run_program "$dist/bin/tessera-gpu-bench" --json "$out/launch.jsonl" \
    --handover-json "$out/handover.jsonl" --vendor-json "$out/gemm_vendor.jsonl" --dist "$dist" \
    --budget-s "$(left_for_program)" "${allow_skip[@]}"
}

run_gemm() {
  run_program "$dist/bin/tessera-gpu-bench-gemm" --json "$out/gemm.jsonl" --budget-s "$(left_for_program)" \
    "${arguments[@]}"
}

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
    { echo "== $tool: exit code $status"; tail -c 1048576 "$scratch/$tool.log"; } >>"$out/run.log"
    [ "$status" = 0 ] && [ "$errors" = 0 ] || { failed=1; tail -n 30 "$scratch/$tool.log" >&2; }
    echo "$tool: $errors errors, exit code $status, $((SECONDS - begin)) s"
    rows+=("$(printf '{"tool": "%s", "errors": %d, "exit_code": %d, "timed_out": %s, "seconds": %d}' "$tool" "$errors" \
      "$status" "$([ "$status" = 124 ] && echo true || echo false)" "$((SECONDS - begin))")")
  done
  printf '{"git": "%s", "sanitizer": "%s", "tools": [\n  %s,\n  %s,\n  %s\n]}\n' "$TESSERA_GIT" \
    "$("$sanitizer" --version 2>/dev/null | grep -oE 'Version [0-9.]+' | head -n 1)" "${rows[@]}" >"$out/sanitize.json"
  return "$failed"
}

: >"$out/run.log"
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
