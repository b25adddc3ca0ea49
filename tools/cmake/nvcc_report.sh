#!/usr/bin/env bash
# Runs a compile command of nvcc and keeps what it prints (ptxas -v: registers, spills, warnings) in OBJECT.ptxas, where
# tools/check_device_code.py reads it: the text of an object must outlive the build that made it.
set -o pipefail
report=/dev/null
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && [[ "$argument" == *.o ]] && report="$argument.ptxas"
  previous=$argument
done
"$@" 2>&1 | tee "$report"
