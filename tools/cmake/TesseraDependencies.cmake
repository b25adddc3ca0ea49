# Third-party packages, all from the distribution (tools/install_packages.sh installs them).

set(CMAKE_FIND_PACKAGE_PREFER_CONFIG ON)
set(THREADS_PREFER_PTHREAD_FLAG ON)

find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(Boost 1.74 REQUIRED)
find_package(prometheus-cpp REQUIRED)
find_package(spdlog REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(CLI11 REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(Python3 3.11 REQUIRED COMPONENTS Interpreter)
if(TESSERA_BUILD_TESTS)
  find_package(GTest REQUIRED)
  find_package(benchmark REQUIRED)
endif()

# Boost.Asio and Boost.Beast are header-only; one interface target states how we use them.
add_library(tessera_asio INTERFACE)
target_link_libraries(tessera_asio INTERFACE Boost::headers Threads::Threads)
target_compile_definitions(tessera_asio INTERFACE BOOST_ASIO_NO_DEPRECATED)
