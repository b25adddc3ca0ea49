#!/usr/bin/env bash
# Formats the C++ sources with clang-format-16; --check only tells which files differ (exit 1 if any does).
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t files < <(git ls-files --cached --others --exclude-standard '*.h' '*.cc' '*.cu' '*.cuh')
if [ "${1:-}" = "--check" ]; then
  clang-format-16 --dry-run -Werror "${files[@]}" || { echo "run tools/format.sh" >&2; exit 1; }
  echo "formatting: ${#files[@]} files clean"
else
  clang-format-16 -i "${files[@]}"
fi
