#!/usr/bin/env bash
# Runs tests under a sanitizer:  tools/sanitize.sh address|thread
#
# address  AddressSanitizer and UndefinedBehaviorSanitizer over the unit tests that touch memory and untrusted input
# thread   ThreadSanitizer over everything concurrent that is free of gRPC: the distribution's gRPC is not instrumented,
#          so races inside RPC handlers would be hidden; handlers only decode and post
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  address)
    preset=asan
    tests=(bind_test buffer_test decode_test executor_test overlap_test session_table_test side_channel_test peer_test
           unix_listener_test tensor_file_test settings_test http_server_test)
    ;;
  thread)
    preset=tsan
    tests=(executor_test session_table_test side_channel_test peer_test metrics_test http_server_test)
    # The distribution's libraries are not instrumented.
    export TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1"
    ;;
  *)
    echo "usage: tools/sanitize.sh address|thread" >&2
    exit 2
    ;;
esac
tools/build.sh "$preset" "${tests[@]}"
pattern=$(IFS='|'; echo "^(${tests[*]})\$")
ctest --preset "$preset" -R "$pattern" -j "$(nproc)"
