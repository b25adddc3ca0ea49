#!/usr/bin/env bash
# Fuzzes the request path (parse, decode, bind, plan) from the seeds of tests/fuzz/corpus:  tools/fuzz.sh [SECONDS]
# Default: 60 seconds. Exit 1: an input broke a promise (it stays in build/fuzz/crashes, with how to run it again), or too
# few inputs got through to be bound, so that the run says little.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
seconds=${1:-60}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "fuzz: not a number of seconds: $seconds (try --help)" >&2; exit 2; }

bound_percent_min=5
max_len=4096 # bytes; room for inline data on both sides of the harness's limit in every tensor

tools/install_packages.sh --all
tools/build.sh fuzz gemm_request_fuzzer
build=build/fuzz
fuzzer=$build/tests/fuzz/gemm_request_fuzzer
log=$build/fuzz.log
message=(-I proto tessera/v1/compute.proto)

corpus=$(mktemp -d "${TMPDIR:-/tmp}/tessera-fuzz.XXXXXX")
trap 'rm -rf "$corpus"' EXIT
for seed in tests/fuzz/corpus/gemm_request/*; do
  name=$(basename "$seed")
  case "$seed" in
    *.textproto) protoc --encode=tessera.v1.GemmRequest "${message[@]}" <"$seed" >"$corpus/${name%.textproto}" ;;
    *) cp "$seed" "$corpus/$name" ;;
  esac
done
mkdir -p "$build/crashes"
# Stacks with names and lines from binutils: llvm-symbolizer is in none of our packages.
symbols="allow_addr2line=1:external_symbolizer_path=$(command -v addr2line)"
# Whole stacks of every allocation would fill the memory limit within the hour; the second run of a crash has them.
export ASAN_OPTIONS="$symbols:malloc_context_size=2:quarantine_size_mb=64" UBSAN_OPTIONS=print_stacktrace=1

echo "fuzzing for $seconds s from $(find "$corpus" -type f | wc -l) seeds (log: $log)"
flags=(-max_total_time="$seconds" -max_len="$max_len" -timeout=5 -rss_limit_mb=2048 -print_final_stats=1
       -artifact_prefix="$build/crashes/")
if ! "$fuzzer" "${flags[@]}" "$corpus" >"$log" 2>&1; then
  grep -nE -m1 -A12 'broken promise:|ERROR: |runtime error:' "$log" >&2 || tail -20 "$log" >&2
  input=$(sed -n 's/^.*Test unit written to //p' "$log" | tail -1)
  echo "fuzz: FAILED; see $log" >&2
  if [ -n "$input" ]; then
    echo "run it again: ASAN_OPTIONS=$symbols UBSAN_OPTIONS=$UBSAN_OPTIONS $fuzzer $input" >&2
    echo "read it:      protoc --decode=tessera.v1.GemmRequest ${message[*]} <$input" >&2
  fi
  exit 1
fi

awk -v least="$bound_percent_min" '
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
    if (100 * count["bound"] < least * total) { printf "fuzz: FAILED; fewer than %d %% were bound\n", least; exit 1 }
  }' "$log"
