# Which GPUs this build makes code for.
#
# TESSERA_CUDA_ARCHS (cache or environment): a list of tokens such as "80;89;90a;120a", one image in the binary a token.
# Unset: the GPUs of this machine. Sets TESSERA_CUDA (ON with at least one token and a compiler), and the lists of tokens
# that each tree of kernels is compiled for: TESSERA_CUDA_ARCHS_SM80, _SM89 (fp8 mma) and _SM90A (wgmma).
#
# Without tokens, or without nvcc, the build has the cpu backend only, and says so.

set(TESSERA_CUDA_ARCHS "$ENV{TESSERA_CUDA_ARCHS}" CACHE STRING
    "GPU architectures to compile for, such as 80;89;90a;120a; empty: those of this machine")
if(DEFINED ENV{TESSERA_CUDA_ARCHS})  # also in a folder that was configured before
  set(TESSERA_CUDA_ARCHS "$ENV{TESSERA_CUDA_ARCHS}" CACHE STRING "" FORCE)
endif()
set(TESSERA_CUDA OFF CACHE INTERNAL "whether this build has CUDA code")

# The architectures of this machine's GPUs as tokens; empty if there are none.
function(tessera_local_gpus out)
  set(${out} "" PARENT_SCOPE)
  find_program(TESSERA_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(TESSERA_NVIDIA_SMI)
  if(NOT TESSERA_NVIDIA_SMI)
    return()
  endif()
  execute_process(COMMAND ${TESSERA_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE capabilities ERROR_QUIET RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    return()
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${capabilities}")
  list(TRANSFORM capabilities REPLACE "\\." "")
  list(REMOVE_DUPLICATES capabilities)
  # The images with the architecture's own instructions: wgmma on Hopper, block-scaled mma on Blackwell.
  list(TRANSFORM capabilities REPLACE "^(90|1[0-9][0-9])$" "\\1a")
  set(${out} "${capabilities}" PARENT_SCOPE)
endfunction()

function(tessera_check_arch token)
  if(NOT token MATCHES "^[0-9]+[af]?$")
    message(FATAL_ERROR "TESSERA_CUDA_ARCHS: '${token}' is no architecture; tokens look like 80, 90a, 120a")
  endif()
  string(REGEX MATCH "^[0-9]+" number ${token})
  if(number LESS 80)
    message(FATAL_ERROR "TESSERA_CUDA_ARCHS: ${token}: kernels need sm_80 or later")
  endif()
  if(token MATCHES "[af]$" AND number LESS 90)
    message(FATAL_ERROR "TESSERA_CUDA_ARCHS: ${token}: only 90 and later have instructions of their own")
  endif()
  if(NOT number IN_LIST TESSERA_NVCC_ARCHS)  # which nvcc lists without suffixes
    list(JOIN TESSERA_NVCC_ARCHS ", " known)
    message(FATAL_ERROR "TESSERA_CUDA_ARCHS: nvcc ${CUDAToolkit_VERSION} cannot compile for ${token}; it knows ${known}")
  endif()
  if(token MATCHES "^(90|120)$")
    message(WARNING "TESSERA_CUDA_ARCHS: plain ${token} leaves out that architecture's own instructions, and the kernels "
                    "that use them; ${token}a has them")
  endif()
endfunction()

if(TESSERA_SANITIZE)
  set(tessera_no_cuda "a sanitizer build")
else()
  set(tessera_archs ${TESSERA_CUDA_ARCHS})
  if(NOT tessera_archs)
    tessera_local_gpus(tessera_archs)
  endif()
  if(NOT tessera_archs)
    set(tessera_no_cuda "no GPU here and TESSERA_CUDA_ARCHS is not set")
  else()
    find_package(CUDAToolkit 12.5 QUIET)
    if(NOT CUDAToolkit_NVCC_EXECUTABLE OR NOT TARGET CUDA::cudart_static)
      set(tessera_no_cuda "no CUDA toolkit from 12.5 on (nvcc and the static runtime) for TESSERA_CUDA_ARCHS=${tessera_archs}")
    endif()
  endif()
endif()

if(tessera_no_cuda)
  message(STATUS "CUDA: off, this build has the cpu backend only: ${tessera_no_cuda}")
  return()
endif()

execute_process(COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} --list-gpu-code OUTPUT_VARIABLE TESSERA_NVCC_ARCHS
                COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[0-9]+" TESSERA_NVCC_ARCHS "${TESSERA_NVCC_ARCHS}")
foreach(token IN LISTS tessera_archs)
  tessera_check_arch(${token})
  string(REGEX MATCH "^[0-9]+" number ${token})
  list(APPEND TESSERA_CUDA_ARCHS_SM80 ${token})
  if(number GREATER_EQUAL 89)
    list(APPEND TESSERA_CUDA_ARCHS_SM89 ${token})
  endif()
  if(token STREQUAL "90a")
    list(APPEND TESSERA_CUDA_ARCHS_SM90A ${token})
  endif()
endforeach()

# The architectures are given by tessera_cuda_sources, for CMake 3.25 does not know all of them.
set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know what nvcc can
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(TESSERA_CUDA ON CACHE INTERNAL "whether this build has CUDA code")
list(JOIN tessera_archs " " tessera_arch_text)
message(STATUS "CUDA: ${CUDAToolkit_VERSION}, images for ${tessera_arch_text}")

# tessera_cuda_library(NAME ARCHS... SOURCES... DEPS...): a static library of device code with an image for each of ARCHS.
# ptxas reports what each kernel takes in the build log, and fails on a spill or on local memory.
function(tessera_cuda_library name)
  cmake_parse_arguments(ARG "" "" "ARCHS;SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC tessera_flags CUDA::cudart_static ${ARG_DEPS})
  foreach(token IN LISTS ARG_ARCHS)
    target_compile_options(${name} PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-gencode arch=compute_${token},code=sm_${token}>")
  endforeach()
  target_compile_options(${name} PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-O3 -DNDEBUG --compress-mode=size --expt-relaxed-constexpr -Werror=all-warnings>"
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xptxas -v,-warn-spills,-warn-lmem-usage,-Werror>")
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES OFF
    CUDA_COMPILER_LAUNCHER ${CMAKE_SOURCE_DIR}/tools/cmake/nvcc_report.sh)
endfunction()
