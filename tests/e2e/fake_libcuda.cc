// A libcuda.so.1 without a GPU, for the CUDA runtime in tesserad to load where LD_LIBRARY_PATH names its directory. The
// environment says what it answers: FAKE_CUDA_DRIVER_VERSION, such as 13000, and FAKE_CUDA_INIT_RESULT, a CUresult. It
// leaves a file FAKE_CUDA_MARK, for a test to see that it was loaded.
//
// It goes no further than cuInit: the runtime then asks for private tables and checks that the driver is a real one, so
// that a GPU cannot be had from here. What tesserad decides about GPUs is tested apart from the driver.

#include <cuda.h>

#include <cstdlib>
#include <fstream>

namespace {

int Number(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? 0 : std::atoi(text);
}

[[gnu::constructor]] void LeaveMark() {
  if (const char* path = std::getenv("FAKE_CUDA_MARK"); path != nullptr) std::ofstream(path) << "loaded\n";
}

}  // namespace

extern "C" {

CUresult cuDriverGetVersion(int* version) {
  *version = Number("FAKE_CUDA_DRIVER_VERSION");
  return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int /*flags*/) {
  return static_cast<CUresult>(Number("FAKE_CUDA_INIT_RESULT"));
}

}  // extern "C"
