// cuBLASLt's functions, found by name at run time; its header gives the types only.
#pragma once

#include <cublasLt.h>

#include <string>

namespace tessera::kernels::vendor {

struct Library {
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  std::string unavailable;  // why the functions cannot be used; empty if they can
};

// Loaded at the first call and never unloaded. Thread-safe.
const Library& TheLibrary();

// The library's context on `device`, which is current; made at the first call and never destroyed: at exit the driver
// may be gone before it. Thread-safe.
cublasStatus_t HandleOf(const Library& library, int device, cublasLtHandle_t& handle);

}  // namespace tessera::kernels::vendor
