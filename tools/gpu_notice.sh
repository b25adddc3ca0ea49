#!/usr/bin/env bash
# One line that says what a run left out for lack of a GPU. Silent where a device is there.
set -u
if ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
  echo "no GPU here: nothing ran on CUDA; every kernel above ran on the cpu backend"
else
  echo "this release has no CUDA backend yet: the GPU of this machine was not used"
fi
