#include "kernels/gemm/vendor/library.h"

#include <dlfcn.h>

#include <array>
#include <mutex>

namespace tessera::kernels::vendor {
namespace {

// Newest first; the plain name exists where a toolkit is installed.
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};

std::string LastLoaderError() {
  const char* const error = dlerror();
  return error == nullptr ? "unknown error" : error;
}

// Null, with the loader's words for each name, if none can be loaded.
void* Open(std::string& unavailable) {
  std::string errors;
  for (const char* const name : kNames) {
    void* const loaded = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (loaded != nullptr) return loaded;
    errors.append(errors.empty() ? "" : "; ").append(LastLoaderError());
  }
  unavailable = "cuBLASLt cannot be loaded: " + errors;
  return nullptr;
}

template <typename Function>
void Resolve(void* loaded, const char* name, Function& function, std::string& unavailable) {
  function = reinterpret_cast<Function>(dlsym(loaded, name));
  if (function == nullptr && unavailable.empty()) {
    unavailable = std::string("cuBLASLt has no function ") + name + ": " + LastLoaderError();
  }
}

Library Load() {
  Library library;
  void* const loaded = Open(library.unavailable);
  if (loaded == nullptr) return library;
  std::string& unavailable = library.unavailable;
  Resolve(loaded, "cublasLtCreate", library.create, unavailable);
  Resolve(loaded, "cublasLtMatmul", library.matmul, unavailable);
  Resolve(loaded, "cublasLtMatmulAlgoGetHeuristic", library.get_heuristic, unavailable);
  Resolve(loaded, "cublasLtMatmulDescCreate", library.desc_create, unavailable);
  Resolve(loaded, "cublasLtMatmulDescDestroy", library.desc_destroy, unavailable);
  Resolve(loaded, "cublasLtMatmulDescSetAttribute", library.desc_set, unavailable);
  Resolve(loaded, "cublasLtMatrixLayoutCreate", library.layout_create, unavailable);
  Resolve(loaded, "cublasLtMatrixLayoutDestroy", library.layout_destroy, unavailable);
  Resolve(loaded, "cublasLtMatrixLayoutSetAttribute", library.layout_set, unavailable);
  Resolve(loaded, "cublasLtMatmulPreferenceCreate", library.preference_create, unavailable);
  Resolve(loaded, "cublasLtMatmulPreferenceDestroy", library.preference_destroy, unavailable);
  Resolve(loaded, "cublasLtMatmulPreferenceSetAttribute", library.preference_set, unavailable);
  return library;
}

}  // namespace

const Library& TheLibrary() {
  static const Library* const kLibrary = new Library(Load());
  return *kLibrary;
}

cublasStatus_t HandleOf(const Library& library, int device, cublasLtHandle_t& handle) {
  constexpr int kDevicesMax = 64;
  static std::mutex mutex;
  static std::array<cublasLtHandle_t, kDevicesMax> handles{};
  if (device < 0 || device >= kDevicesMax) return CUBLAS_STATUS_NOT_SUPPORTED;
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& made = handles[static_cast<std::size_t>(device)];
  if (made == nullptr) {
    const cublasStatus_t status = library.create(&made);
    if (status != CUBLAS_STATUS_SUCCESS) {
      made = nullptr;
      return status;
    }
  }
  handle = made;
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace tessera::kernels::vendor
