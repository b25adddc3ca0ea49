#!/usr/bin/env bash
# One line that says what a run left out for lack of a GPU, or that it uses one for little.
set -u
if ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
  echo "no GPU here: nothing ran on CUDA; every kernel above ran on the cpu backend"
else
  echo "what ran above uses the cpu backend for the most part; tests/gpu/run.sh tests the GPU of this machine"
fi
