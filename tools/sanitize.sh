#!/usr/bin/env bash
# Runs tests under a sanitizer:  tools/sanitize.sh address|thread
#
# address  AddressSanitizer and UndefinedBehaviorSanitizer over the whole suite, end-to-end tests included
# thread   ThreadSanitizer over everything concurrent that is free of gRPC: the distribution's gRPC is not instrumented,
#          so races inside RPC handlers would be hidden; handlers only decode and post
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  address)
    tools/build.sh asan
    # The documents and the tree are the same in every build.
    ctest --preset asan -E '^(docs_test|tidy_test)$' -j "$(nproc)"
    ;;
  thread)
    tests=(executor_test shared_stress_test session_table_test device_buffer_test side_channel_test peer_test
           gemm_planner_test planner_stress_test audit_log_test metrics_test nvml_test http_server_test supervisor_test
           reaper_test budget_test import_cache_test session_end_test session_sharing_test session_quota_test lifecycle_model_test
           planner_live_unit_test timeline_test executor_order_test device_wait_test sync_page_test sync_table_test)
    tools/build.sh tsan "${tests[@]}"
    # The distribution's libraries are not instrumented.
    export TSAN_OPTIONS="ignore_noninstrumented_modules=1 halt_on_error=1"
    ctest --preset tsan -R "$(IFS='|'; echo "^(${tests[*]})\$")" -j "$(nproc)"
    ;;
  *)
    echo "usage: tools/sanitize.sh address|thread" >&2
    exit 2
    ;;
esac
