// Answers of the planner -> messages of its service.
#pragma once

#include <span>
#include <string_view>

#include "kernels/catalog/gemm_catalog.h"
#include "planner/known_devices.h"
#include "planner/planner.h"
#include "tessera/v1/planner.pb.h"

namespace tessera::server {

void Encode(const planner::Plan& plan, v1::PlanInfo& to);
void Encode(const planner::Decision& decision, v1::Decision& to);
void Encode(const planner::ChangeResult& result, v1::ChangeReply& to);
// All but the file of rows, which the planner does not know.
void Encode(const planner::PlannerState& state, v1::PlannerStateReply& to);
void Encode(const planner::AuditEntry& entry, v1::PlannerChange& to);
// `probe` has a plan.
void Encode(const planner::Probe& probe, v1::ProbeReply& to);
void Encode(const planner::Recipe& recipe, bool available, v1::Recipe& to);
void Encode(const planner::DeviceFacts& facts, std::string_view name, std::string_view description, bool served,
            v1::DeviceFactsInfo& to);

}  // namespace tessera::server
