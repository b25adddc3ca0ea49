#!/usr/bin/env bash
# Fuzzes the request path (parse, decode, bind, plan) and the planner's rows (parse, text, lookup, plan) from the seeds
# of tests/fuzz/corpus:  tools/fuzz.sh [SECONDS [gemm_request|planner_rows]]
# Default: both, in 60 seconds together. Exit 1: an input broke a promise (it stays in build/fuzz/crashes, with how to
# run it again), or too few inputs got through to where it matters, so that the run says little.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
seconds=${1:-60}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "fuzz: not a number of seconds: $seconds (try --help)" >&2; exit 2; }
case "${2:-}" in
  "") targets=(gemm_request planner_rows) ;;
  gemm_request | planner_rows) targets=("$2") ;;
  *) echo "fuzz: no fuzzer is named $2 (try --help)" >&2; exit 2 ;;
esac

tools/install_packages.sh --all
tools/build.sh fuzz "${targets[@]/%/_fuzzer}"
build=build/fuzz
mkdir -p "$build/crashes"
message=(-I proto tessera/v1/compute.proto)
# Stacks with names and lines from binutils: llvm-symbolizer is in none of our packages.
symbols="allow_addr2line=1:external_symbolizer_path=$(command -v addr2line)"
# Whole stacks of every allocation would fill the memory limit within the hour; the second run of a crash has them.
export ASAN_OPTIONS="$symbols:malloc_context_size=2:quarantine_size_mb=64" UBSAN_OPTIONS=print_stacktrace=1

# copy_seeds TARGET FOLDER: seeds as the fuzzer reads them.
copy_seeds() {
  local seed name
  for seed in "tests/fuzz/corpus/$1"/*; do
    name=$(basename "$seed")
    case "$seed" in
      *.textproto) protoc --encode=tessera.v1.GemmRequest "${message[@]}" <"$seed" >"$2/${name%.textproto}" ;;
      *) cp "$seed" "$2/$name" ;;
    esac
  done
}

# fuzz TARGET SECONDS FLAG...
fuzz() {
  local target=$1 for_seconds=$2 fuzzer="$build/tests/fuzz/$1_fuzzer" log="$build/$1.log" input
  shift 2
  local seeds="$corpus/$target"
  mkdir "$seeds"
  copy_seeds "$target" "$seeds"
  echo "fuzzing $target for $for_seconds s from $(find "$seeds" -type f | wc -l) seeds (log: $log)"
  if ! "$fuzzer" -max_total_time="$for_seconds" -timeout=5 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="$build/crashes/" "$@" "$seeds" >"$log" 2>&1; then
    grep -anE -m1 -A12 'broken promise:|ERROR: |runtime error:' "$log" >&2 || tail -20 "$log" >&2
    input=$(sed -n 's/^.*Test unit written to //p' "$log" | tail -1)
    echo "fuzz: FAILED; see $log" >&2
    if [ -n "$input" ]; then
      echo "run it again: ASAN_OPTIONS=$symbols UBSAN_OPTIONS=$UBSAN_OPTIONS $fuzzer $input" >&2
      [ "$target" = gemm_request ] &&
        echo "read it:      protoc --decode=tessera.v1.GemmRequest ${message[*]} <$input" >&2
    fi
    exit 1
  fi
}

# check_share TARGET OUTCOME PERCENT: at least so many of its inputs ended so.
check_share() {
  awk -v outcome="$2" -v least="$3" '
    /^#[0-9]+.* cov: / { for (i = 1; i < NF; ++i) if ($i == "cov:" || $i == "ft:") last[$i] = $(i + 1) }
    /^stat::average_exec_per_sec:/ { rate = $2 }
    /^outcomes:/ {
      for (i = 2; i <= NF; ++i) { split($i, pair, "="); name[i] = pair[1]; count[pair[1]] = pair[2]; total += pair[2] }
      for (i = 2; i <= NF; ++i) shares = shares sprintf(" %s %.1f %%", name[i], 100 * count[name[i]] / total)
    }
    END {
      if (total == 0) { print "fuzz: FAILED; no outcomes in the log"; exit 1 }
      printf "%d executions, %d a second, coverage %d edges, %d features\noutcomes:%s\n",
             total, rate, last["cov:"], last["ft:"], shares
      if (100 * count[outcome] < least * total) {
        printf "fuzz: FAILED; fewer than %d %% were %s\n", least, outcome
        exit 1
      }
    }' "$build/$1.log"
}

corpus=$(mktemp -d "${TMPDIR:-/tmp}/tessera-fuzz.XXXXXX")
trap 'rm -rf "$corpus"' EXIT
each=$(((seconds + ${#targets[@]} - 1) / ${#targets[@]}))
for target in "${targets[@]}"; do
  case "$target" in
    gemm_request)
      # Room for inline data on both sides of the harness's limit in every tensor.
      fuzz gemm_request "$each" -max_len=4096
      check_share gemm_request bound 5
      ;;
    planner_rows)
      # Room for a few lines on both sides of the limit of one.
      fuzz planner_rows "$each" -max_len=4096 -dict=tests/fuzz/planner_rows.dict
      check_share planner_rows decided 5
      ;;
  esac
done
