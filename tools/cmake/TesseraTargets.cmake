# Options, compile flags and the two helpers that every folder uses to declare its target.

option(TESSERA_BUILD_TESTS "Build the unit and end-to-end tests" ON)
set(TESSERA_SANITIZE "" CACHE STRING "Sanitizers for the whole build: empty, 'address', 'thread' or 'fuzzer'")
set_property(CACHE TESSERA_SANITIZE PROPERTY STRINGS "" address thread fuzzer)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

add_library(tessera_flags INTERFACE)
target_include_directories(tessera_flags INTERFACE ${CMAKE_SOURCE_DIR})
# Designated initialisers leave the rest at their defaults on purpose; -Wpsabi speaks of ABIs before GCC 4.6; GCC 12's
# -Wrestrict is wrong about std::string concatenation (GCC bug 105651).
set(TESSERA_WARNINGS -Wall -Wextra -Wshadow -Wno-missing-field-initializers -Wno-psabi -Wno-restrict -Werror)
target_compile_options(tessera_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${TESSERA_WARNINGS}>")
if(TESSERA_SANITIZE STREQUAL "address")
  # With these sanitizers GCC 12 takes much of its own <regex> for uninitialised (GCC bug 105562).
  target_compile_options(tessera_flags INTERFACE -g1 -fno-omit-frame-pointer -fsanitize=address,undefined
                                                 -fno-sanitize-recover=undefined -Wno-maybe-uninitialized)
  target_link_options(tessera_flags INTERFACE -fsanitize=address,undefined)
elseif(TESSERA_SANITIZE STREQUAL "thread")
  target_compile_options(tessera_flags INTERFACE -g1 -fno-omit-frame-pointer -fsanitize=thread -Wno-tsan)
  target_link_options(tessera_flags INTERFACE -fsanitize=thread)
elseif(TESSERA_SANITIZE STREQUAL "fuzzer")
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "TESSERA_SANITIZE=fuzzer needs Clang (libFuzzer); the preset `fuzz` asks for clang++-16")
  endif()
  # Clang does not know all of the warnings above.
  target_compile_options(tessera_flags INTERFACE -g1 -fno-omit-frame-pointer -Wno-unknown-warning-option
                                                 -fsanitize=fuzzer-no-link,address,undefined
                                                 -fno-sanitize-recover=undefined)
  target_link_options(tessera_flags INTERFACE -fsanitize=address,undefined)
elseif(NOT TESSERA_SANITIZE STREQUAL "")
  message(FATAL_ERROR "TESSERA_SANITIZE=${TESSERA_SANITIZE}: expected empty, 'address', 'thread' or 'fuzzer'")
endif()

# tessera_library(NAME SOURCES... DEPS...): a static library of one folder.
function(tessera_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  if(ARG_SOURCES)
    add_library(${name} STATIC ${ARG_SOURCES})
    target_link_libraries(${name} PUBLIC tessera_flags ${ARG_DEPS})
  else()
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE tessera_flags ${ARG_DEPS})
  endif()
endfunction()

# tessera_test(NAME LABEL SOURCES... DEPS...): a GoogleTest program registered with ctest under LABEL.
function(tessera_test name label)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(TESSERA_SANITIZE)
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 5")
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE tessera_flags ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS ${label} TIMEOUT ${ARG_TIMEOUT})
endfunction()

# tessera_soak(TEST FILTER TIMEOUT seconds): those tests of TEST that FILTER (as --gtest_filter) matches, at full length:
# they look for TESSERA_SOAK in their environment. Label soak, which the presets leave out and `--preset soak` runs.
function(tessera_soak test filter)
  cmake_parse_arguments(ARG "" "TIMEOUT" "" ${ARGN})
  add_test(NAME ${test}_soak COMMAND ${test} --gtest_filter=${filter})
  set_tests_properties(${test}_soak PROPERTIES LABELS soak TIMEOUT ${ARG_TIMEOUT} ENVIRONMENT TESSERA_SOAK=1)
endfunction()

# tessera_fuzzer(NAME SOURCES... DEPS...): a libFuzzer program; only with TESSERA_SANITIZE=fuzzer.
function(tessera_fuzzer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE tessera_flags ${ARG_DEPS})
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
endfunction()
