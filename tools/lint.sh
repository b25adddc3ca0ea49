#!/usr/bin/env bash
# Runs clang-tidy-16 over the C++ sources that changed, with the checks of .clang-tidy. Needs the build of preset cpu.
#
#   tools/lint.sh          what differs from origin/main; where nothing does, as on main itself, the last 20 commits
#   tools/lint.sh REV      what differs from REV
#   tools/lint.sh --all    every source: up to 15 seconds of CPU each
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac

# A changed header is looked at through the source of its name.
sources_of() {
  while IFS= read -r file; do
    case "$file" in
      *.cc) echo "$file" ;;
      *.h) echo "${file%.h}.cc" ;;
    esac
  done | sort -u | while IFS= read -r file; do
    if [ -f "$file" ] && grep -q "/$file\"" build/cpu/compile_commands.json; then echo "$file"; fi
  done
}

changed() {
  local base=${1:-}
  if [ -z "$base" ] && base=$(git merge-base HEAD origin/main 2>/dev/null) && [ "$base" = "$(git rev-parse HEAD)" ]; then
    base=
  fi
  if [ -n "$base" ]; then
    git diff --name-only "$base"
  else
    git log -20 --name-only --format=
    git diff --name-only HEAD
  fi
  git ls-files --others --exclude-standard
}

if [ ! -f build/cpu/compile_commands.json ]; then
  echo "lint: no build of preset cpu; run tools/build.sh cpu first" >&2
  exit 1
fi
if [ "${1:-}" = --all ]; then
  mapfile -t sources < <(git ls-files '*.cc' | sources_of)
else
  mapfile -t sources < <(changed "${1:-}" | sources_of)
fi
if [ ${#sources[@]} -eq 0 ]; then
  echo "lint: nothing changed"
  exit 0
fi

start=$SECONDS
log=build/lint.log
echo "clang-tidy over ${#sources[@]} sources (log: $log)"
# GCC's warning options are not all Clang's.
if ! printf '%s\n' "${sources[@]}" | xargs -P "${TESSERA_JOBS:-$(nproc)}" -n 1 \
  clang-tidy-16 -p build/cpu --quiet --extra-arg=-Wno-unknown-warning-option >"$log" 2>&1; then
  grep -A4 -E '(error|warning):' "$log" | head -80 >&2
  echo "lint failed; see $log" >&2
  exit 1
fi
echo "lint: ${#sources[@]} sources clean, $((SECONDS - start)) s"
