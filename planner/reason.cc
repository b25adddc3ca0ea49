#include "planner/reason.h"

namespace tessera::planner {

std::string_view Explain(Reason reason) {
  switch (reason) {
    case Reason::kUnknownRecipe:
      return "this build has no such recipe in that class";
    case Reason::kNotOnDevice:
      return "the device does not run kernels of this tree";
    case Reason::kStagingOff:
      return "kernels that load by the copy engine are switched off";
    case Reason::kAlignment:
      return "its loaders cannot address operands of these strides, extents and alignment";
    case Reason::kSharedMemory:
      return "its ring is larger than the shared memory that a block can have on this device";
    case Reason::kSplit:
      return "that many slices of K are not legal for this kernel and this K";
    case Reason::kRaster:
      return "this kernel walks its tiles in an order of its own";
    case Reason::kWorkspace:
      return "it needs more scratch than one launch may use";
    case Reason::kBands:
      return "an extent is outside of the row's bands";
    case Reason::kBlocks:
      return "the problem has fewer tiles than the row's gate asks for";
    case Reason::kOutranked:
      return "another one is preferred";
    case Reason::kRowDecided:
      return "a row names another one";
  }
  return "";
}

}  // namespace tessera::planner
