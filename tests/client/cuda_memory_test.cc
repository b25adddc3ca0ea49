// Which route a pointer takes to another process, what each kind of memory that has none is told, and that nothing is
// left held: over a driver of the test's own.
#include "client/cuda_memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "common/text.h"

namespace tessera::client {
namespace {

using absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr cu::Result kInvalidValue = 1;
constexpr cu::DevicePointer kBase = 0x7f0000200000;
constexpr std::uint64_t kBytes = 0x400000;
constexpr char kUuid[] = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f";

// One GPU with one allocation, which is whatever the test says.
struct FakeGpu {
  std::map<cu::Attribute, std::uint64_t> attributes;
  bool vmm = false;
  int handle_types = cu::kPosixFileDescriptor;
  bool mig = false;
  cu::Result ipc_result = cu::kSuccess;
  cu::Result map_result = cu::kSuccess;
  cu::Context current = nullptr;
  int pushed = 0;
  int held = 0;  // allocations retained or imported and not released
  int reserved = 0;
  int mapped = 0;
  std::vector<std::string> copies;
};
FakeGpu gpu;

CudaDriver MakeDriver() {
  CudaDriver d;
  d.get_error_string = [](cu::Result, const char** text) { return *text = "the fake's error", cu::kSuccess; };
  d.device_get_count = [](int* count) { return *count = 1, cu::kSuccess; };
  d.device_get = [](cu::Device* device, int ordinal) { return *device = ordinal, cu::kSuccess; };
  d.device_get_parent_uuid = [](cu::Uuid* uuid, cu::Device) {
    for (std::size_t i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<unsigned char>(i);
    return cu::kSuccess;
  };
  d.device_get_uuid = [](cu::Uuid* uuid, cu::Device) {
    for (std::size_t i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<unsigned char>(i);
    if (gpu.mig) uuid->bytes[0] = 0xff;
    return cu::kSuccess;
  };
  d.primary_context_retain = [](cu::Context* context, cu::Device) { return *context = &gpu, cu::kSuccess; };
  d.context_get_current = [](cu::Context* context) { return *context = gpu.current, cu::kSuccess; };
  d.context_get_device = [](cu::Device* device) { return *device = 0, cu::kSuccess; };
  d.context_push = [](cu::Context) { return ++gpu.pushed, cu::kSuccess; };
  d.context_pop = [](cu::Context*) { return --gpu.pushed, cu::kSuccess; };
  d.pointer_get_attribute = [](void* data, cu::Attribute attribute, cu::DevicePointer) {
    const auto found = gpu.attributes.find(attribute);
    if (found == gpu.attributes.end()) return kInvalidValue;
    const bool wide = attribute != cu::Attribute::kDeviceOrdinal && attribute != cu::Attribute::kIsManaged &&
                      attribute != cu::Attribute::kIsLegacyIpcCapable && attribute != cu::Attribute::kMemoryType;
    std::memcpy(data, &found->second, wide ? 8 : 4);
    return cu::kSuccess;
  };
  d.mem_get_address_range = [](cu::DevicePointer* base, std::size_t* bytes, cu::DevicePointer) {
    return *base = kBase, *bytes = kBytes, cu::kSuccess;
  };
  d.ipc_get_mem_handle = [](cu::IpcMemHandle* handle, cu::DevicePointer pointer) {
    std::memcpy(handle->bytes.data(), &pointer, sizeof(pointer));
    return gpu.ipc_result;
  };
  d.mem_retain = [](cu::Allocation* allocation, void*) {
    if (!gpu.vmm) return kInvalidValue;
    return ++gpu.held, *allocation = 9, cu::kSuccess;
  };
  d.mem_get_properties = [](cu::AllocationProperties* properties, cu::Allocation) {
    return properties->requested_handle_types = gpu.handle_types, cu::kSuccess;
  };
  d.mem_export = [](void* handle, cu::Allocation, int, unsigned long long) {
    return *static_cast<int*>(handle) = ::open("/dev/null", O_RDWR | O_CLOEXEC), cu::kSuccess;
  };
  d.mem_import = [](cu::Allocation* allocation, void*, int) { return ++gpu.held, *allocation = 9, cu::kSuccess; };
  d.mem_release = [](cu::Allocation) { return --gpu.held, cu::kSuccess; };
  d.mem_reserve = [](cu::DevicePointer* pointer, std::size_t, std::size_t, cu::DevicePointer, unsigned long long) {
    return ++gpu.reserved, *pointer = kBase, cu::kSuccess;
  };
  d.mem_address_free = [](cu::DevicePointer, std::size_t) { return --gpu.reserved, cu::kSuccess; };
  d.mem_map = [](cu::DevicePointer, std::size_t, std::size_t, cu::Allocation, unsigned long long) {
    if (gpu.map_result == cu::kSuccess) ++gpu.mapped;
    return gpu.map_result;
  };
  d.mem_unmap = [](cu::DevicePointer, std::size_t) { return --gpu.mapped, cu::kSuccess; };
  d.mem_set_access = [](cu::DevicePointer, std::size_t, const cu::AccessDescription*, std::size_t) {
    return cu::kSuccess;
  };
  d.memcpy_to_device = [](cu::DevicePointer, const void*, std::size_t) {
    return gpu.copies.emplace_back("to device"), cu::kSuccess;
  };
  d.memcpy_to_host = [](void*, cu::DevicePointer, std::size_t) {
    return gpu.copies.emplace_back("to host"), cu::kSuccess;
  };
  d.stream_synchronize = [](cu::Stream) { return gpu.copies.emplace_back("synchronize"), cu::kSuccess; };
  return d;
}

class CudaMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    gpu = FakeGpu();
    gpu.attributes = {{cu::Attribute::kMemoryType, cu::kMemoryTypeDevice},
                      {cu::Attribute::kIsManaged, 0},
                      {cu::Attribute::kDeviceOrdinal, 0},
                      {cu::Attribute::kBufferId, 41},
                      {cu::Attribute::kIsLegacyIpcCapable, 1}};
  }
  void TearDown() override {
    EXPECT_EQ(gpu.pushed, 0);
    EXPECT_EQ(gpu.held, 0);
    EXPECT_EQ(gpu.reserved, 0);
    EXPECT_EQ(gpu.mapped, 0);
  }

  void MakeVmm() {
    gpu.vmm = true;
    gpu.attributes[cu::Attribute::kIsLegacyIpcCapable] = 0;
  }

  absl::StatusOr<ExportedMemory> Export(std::uint64_t offset, std::uint64_t bytes) {
    return ExportMemory(driver_, reinterpret_cast<void*>(kBase + offset), bytes);
  }

  void ExpectRefused(StatusCode code, const std::string& text) {
    const absl::Status status = Export(0, 0).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(MessageOf(status), HasSubstr(text));
  }

  const CudaDriver driver_ = MakeDriver();
};

TEST_F(CudaMemoryTest, CudaMallocMemoryTakesTheHandleOfItsFirstByte) {
  const auto memory = Export(4096, 100);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const auto* route = std::get_if<LegacyRoute>(&memory->route);
  ASSERT_NE(route, nullptr);
  ASSERT_EQ(route->handle.size(), 64U);
  cu::DevicePointer named = 0;
  std::memcpy(&named, route->handle.data(), sizeof(named));
  EXPECT_EQ(named, kBase);
  EXPECT_EQ(memory->byte_offset, 4096U);
  EXPECT_EQ(memory->bytes, 100U);
  EXPECT_EQ(memory->allocation_id, 41U);
  EXPECT_EQ(memory->device_uuid, kUuid);
}

TEST_F(CudaMemoryTest, NoBytesMeansToTheEnd) {
  const auto memory = Export(kBytes - 24, 0);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->bytes, 24U);
}

TEST_F(CudaMemoryTest, RangesStayInTheAllocation) {
  for (const std::uint64_t bytes : {std::uint64_t{25}, ~std::uint64_t{0}}) {
    const absl::Status status = Export(kBytes - 24, bytes).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(MessageOf(status), HasSubstr("has 24 from there on"));
  }
}

TEST_F(CudaMemoryTest, CuMemCreateMemoryTakesItsDescriptor) {
  MakeVmm();
  gpu.attributes[cu::Attribute::kMappingBase] = kBase + 0x200000;  // second mapping of a reservation
  gpu.attributes[cu::Attribute::kMappingSize] = 0x200000;
  gpu.attributes[cu::Attribute::kMemoryBlockId] = 43;
  const auto memory = Export(0x200010, 0);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const auto* route = std::get_if<DescriptorRoute>(&memory->route);
  ASSERT_NE(route, nullptr);
  EXPECT_TRUE(route->fd);
  EXPECT_EQ(route->allocation_bytes, 0x200000U);
  EXPECT_EQ(memory->byte_offset, 0x10U);
  EXPECT_EQ(memory->bytes, 0x1ffff0U);
  EXPECT_EQ(memory->allocation_id, 43U);
}

TEST_F(CudaMemoryTest, OlderDriversKnowTheRangeOnly) {
  MakeVmm();
  const auto memory = Export(16, 0);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(std::get<DescriptorRoute>(memory->route).allocation_bytes, kBytes);
  EXPECT_EQ(memory->allocation_id, 41U);
}

TEST_F(CudaMemoryTest, MemoryThatCannotBeShared) {
  gpu.attributes[cu::Attribute::kMemoryType] = 1;
  ExpectRefused(StatusCode::kInvalidArgument, "not GPU memory");
  gpu.attributes.erase(cu::Attribute::kMemoryType);
  ExpectRefused(StatusCode::kInvalidArgument, "not GPU memory");
  gpu.attributes[cu::Attribute::kMemoryType] = cu::kMemoryTypeDevice;
  gpu.attributes[cu::Attribute::kIsManaged] = 1;
  ExpectRefused(StatusCode::kFailedPrecondition, "cudaMallocManaged");
  gpu.attributes[cu::Attribute::kIsManaged] = 0;
  gpu.ipc_result = kInvalidValue;
  ExpectRefused(StatusCode::kFailedPrecondition, "handle route: ");
  gpu.attributes[cu::Attribute::kIsLegacyIpcCapable] = 0;
  gpu.attributes[cu::Attribute::kMempoolHandle] = 0x1234;
  ExpectRefused(StatusCode::kFailedPrecondition, "cudaMallocAsync");
  gpu.attributes[cu::Attribute::kMempoolHandle] = 0;
  ExpectRefused(StatusCode::kFailedPrecondition, "AllocateOnDevice");
  MakeVmm();
  gpu.handle_types = 0;
  ExpectRefused(StatusCode::kFailedPrecondition, "descriptor route: ");
}

TEST_F(CudaMemoryTest, MigInstancesAreNamedAsSuch) {
  gpu.mig = true;
  const auto memory = Export(0, 0);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->device_uuid, "MIG-ff010203-0405-0607-0809-0a0b0c0d0e0f");
}

TEST_F(CudaMemoryTest, MappingIsUndoneWithItsObject) {
  {
    auto mapped = MappedAllocation::Map(driver_, kUuid, UniqueFd(), kBytes);
    ASSERT_TRUE(mapped.ok()) << mapped.status();
    const MappedAllocation moved = *std::move(mapped);
    EXPECT_EQ(reinterpret_cast<cu::DevicePointer>(moved.data()), kBase);
    EXPECT_EQ(gpu.mapped, 1);
    EXPECT_EQ(gpu.held, 0) << "the mapping keeps the memory";
  }
  EXPECT_EQ(gpu.mapped, 0);
}

TEST_F(CudaMemoryTest, FailedMappingLeavesNothing) {
  gpu.map_result = kInvalidValue;
  const absl::Status status = MappedAllocation::Map(driver_, kUuid, UniqueFd(), kBytes).status();
  EXPECT_THAT(MessageOf(status), HasSubstr("cuMemMap: the fake's error (CUDA error 1)"));
  gpu.map_result = cu::kOutOfMemory;
  EXPECT_EQ(MappedAllocation::Map(driver_, kUuid, UniqueFd(), kBytes).status().code(), StatusCode::kResourceExhausted);
}

TEST_F(CudaMemoryTest, GpusThatThisProcessDoesNotSee) {
  const absl::Status status = MappedAllocation::Map(driver_, "GPU-ffff", UniqueFd(), kBytes).status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_THAT(MessageOf(status), HasSubstr("CUDA_VISIBLE_DEVICES"));
}

TEST_F(CudaMemoryTest, ContextsOfTheCallerAreUsed) {
  gpu.current = &gpu;
  auto context = CurrentContext::Of(driver_, 0);
  ASSERT_TRUE(context.ok());
  EXPECT_EQ(gpu.pushed, 0);
  auto other = CurrentContext::Of(driver_, 1);
  ASSERT_TRUE(other.ok());
  EXPECT_EQ(gpu.pushed, 1);
}

TEST_F(CudaMemoryTest, UploadsAreCompleteForOtherProcesses) {
  char byte = 0;
  ASSERT_TRUE(CopyToDevice(driver_, kUuid, nullptr, &byte, 1).ok());
  ASSERT_TRUE(CopyToHost(driver_, kUuid, &byte, nullptr, 1).ok());
  EXPECT_THAT(gpu.copies, ElementsAre("to device", "synchronize", "to host"));
}

}  // namespace
}  // namespace tessera::client
