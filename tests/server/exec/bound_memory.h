// A session table with one session, for tests that bind calls to buffers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <utility>

#include "server/exec/bind.h"
#include "server/session/session_table.h"

namespace tessera::server {

inline const Peer kTestPeer{.pid = 1, .uid = 1000, .gid = 1000};

inline std::shared_ptr<Session> OpenTestSession(SessionTable& table) {
  const auto lease = table.OpenLease(kTestPeer);
  if (!lease.ok()) return nullptr;
  const auto token = table.OpenSession(kTestPeer, *lease, "test");
  if (!token.ok()) return nullptr;
  auto session = table.FindSession(kTestPeer, *token);
  return session.ok() ? *std::move(session) : nullptr;
}

// A view into a buffer; strides are packed where `stride` is empty.
inline TensorRef BufferView(std::string_view field, const Id& buffer, DType dtype,
                            std::initializer_list<std::int64_t> shape, std::initializer_list<std::int64_t> stride = {},
                            std::uint64_t byte_offset = 0) {
  TensorRef ref;
  ref.field = field;
  ref.buffer = buffer;
  ref.byte_offset = byte_offset;
  ref.dtype = dtype;
  ref.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), ref.shape.begin());
  std::copy(stride.begin(), stride.end(), ref.stride.begin());
  if (stride.size() == 0) {
    std::int64_t packed = 1;
    for (int i = ref.rank - 1; i >= 0; --i) {
      ref.stride[i] = packed;
      packed *= std::max<std::int64_t>(1, ref.shape[i]);
    }
  }
  return ref;
}

}  // namespace tessera::server
