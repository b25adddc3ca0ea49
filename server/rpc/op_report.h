// What ran, as a reply tells it.
#pragma once

#include "server/exec/executor.h"
#include "tessera/v1/types.pb.h"

namespace tessera::server {

void FillReport(const OperationReport& from, bool profile, v1::OpReport& to);

}  // namespace tessera::server
