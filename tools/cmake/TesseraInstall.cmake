# `cmake --install build/PRESET --prefix DIR --strip` makes a tree that runs from wherever it is put: programs find the
# libraries that come with them in ../lib. Of the system it needs the C and C++ runtimes alone; the NVIDIA driver is looked
# for at run time.
#
# Components: `tessera` (daemon and command line), `gpu_tests` (what tests/gpu/run.sh runs on a machine with a GPU).

set(CMAKE_INSTALL_RPATH "$ORIGIN/../lib")
# An old-style RPATH: unlike a RUNPATH it counts for what the libraries need, too.
add_link_options("$<$<LINK_LANGUAGE:CXX>:LINKER:--disable-new-dtags>" "$<$<LINK_LANGUAGE:CUDA>:LINKER:--disable-new-dtags>")

# tessera_install(COMPONENT TARGET...): programs with the libraries that they need.
function(tessera_install component)
  install(TARGETS ${ARGN}
    RUNTIME_DEPENDENCY_SET ${component}_libraries
    RUNTIME DESTINATION bin COMPONENT ${component})
  install(RUNTIME_DEPENDENCY_SET ${component}_libraries
    PRE_EXCLUDE_REGEXES "^ld-linux" "^libc\\.so" "^libm\\.so" "^libdl\\.so" "^librt\\.so" "^libpthread\\.so" "^libresolv\\.so"
                        "^libstdc\\+\\+" "^libgcc_s"
    LIBRARY DESTINATION lib COMPONENT ${component})
endfunction()
