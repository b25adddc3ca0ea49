// What is wrong with a GEMM call outside its shared memory: tensors in the message, options, the session's token, and
// messages that are no requests at all.

#include <google/protobuf/message.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/generic/generic_stub.h>

#include <future>
#include <random>

#include "tests/e2e/bad_input_fixture.h"

namespace tessera::e2e {
namespace {

using grpc::StatusCode;

constexpr StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;

Mutation Options(const std::function<void(v1::SubmitOptions&)>& change) {
  return [=](v1::GemmRequest& request) { change(*request.mutable_options()); };
}

// Fields that no version of the contract has, in the message and in every message within it.
void AddUnknownFields(google::protobuf::Message& message) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  reflection.MutableUnknownFields(&message)->AddVarint(12'345, 7);
  reflection.MutableUnknownFields(&message)->AddLengthDelimited(12'346)->assign("of a later version");
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const auto* field : fields) {
    if (field->message_type() == nullptr || field->is_repeated()) continue;
    AddUnknownFields(*reflection.MutableMessage(&message, field));
  }
}

class BadCallTest : public BadInputFixture {
 protected:
  // Any bytes as the request of any method, with the session's token.
  grpc::Status Raw(const std::string& method, const std::string& bytes) {
    const grpc::Slice slice(bytes);
    const grpc::ByteBuffer request(&slice, 1);
    grpc::ByteBuffer reply;
    grpc::GenericStub stub(client_->channel());
    const auto context = Context(session_->token());
    std::promise<grpc::Status> done;
    stub.UnaryCall(context.get(), method, grpc::StubOptions(), &request, &reply,
                   [&done](grpc::Status status) { done.set_value(std::move(status)); });
    return done.get_future().get();
  }
};

constexpr char kGemm[] = "/tessera.v1.Compute/Gemm";

TEST_F(BadCallTest, InlineInputs) {
  const std::uint64_t limit = client_->ServerInfo().value().inline_bytes_max();
  std::vector<BadGemm> rows;
  for (std::size_t i = 0; i + 1 < AllOperands().size(); ++i) {
    const Operand& input = AllOperands()[i];
    const std::string field = input.field;
    const auto data = [&](const std::string& bytes) {
      return [bytes, of = input.of](v1::GemmRequest& request) { of(request).set_inline_data(bytes); };
    };
    const std::string good = operands_->image().substr(input.at, input.bytes);
    rows.push_back({field + " one byte short", data(good.substr(1)), kInvalid, field + ": ", "storage has"});
    rows.push_back({field + " empty", data(""), kInvalid, field + ": ", "storage has 0"});
    rows.push_back({field + " beyond the limit", data(std::string(limit + 1, 'x')), StatusCode::RESOURCE_EXHAUSTED,
                    field + ": ", "inline_bytes_max"});
    const auto offset = [of = input.of](v1::GemmRequest& request) { of(request).set_byte_offset(4); };
    rows.push_back({field + " at an offset", offset, kInvalid, field + ": ", "byte_offset 4"});
    const auto result = [of = input.of](v1::GemmRequest& request) { of(request).mutable_inline_result(); };
    rows.push_back({field + " as a result", result, kInvalid, field + ".inline_result: "});
    if (input.dtype == v1::DTYPE_S8) continue;
    const auto odd = [of = input.of, good](v1::GemmRequest& request) {
      of(request).set_inline_data("x" + good);
      of(request).set_byte_offset(1);
    };
    rows.push_back({field + " at an odd address", odd, kInvalid, field + ".byte_offset: "});
  }
  ExpectEach(operands_->Inline(), rows);
}

TEST_F(BadCallTest, InlineOutput) {
  const auto result = [](std::int64_t m, std::int64_t n) {
    return [=](v1::GemmRequest& request) {
      A(request).set_shape(0, m);
      B(request).set_shape(0, n);
      for (v1::Tensor* input : {&A(request), &B(request)}) {
        for (const int stride : {0, 1}) input->add_strides(stride);  // one row for all
      }
      D(request).set_shape(0, m);
      D(request).set_shape(1, n);
    };
  };
  const auto strides = [](v1::GemmRequest& request) {
    for (const std::int64_t stride : {kN, std::int64_t{1}}) D(request).add_strides(stride);
  };
  ExpectEach(
      operands_->Inline(),
      {{"data for the output", [](v1::GemmRequest& request) { D(request).set_inline_data(std::string(96, 'x')); },
        kInvalid, "op.d.inline_data: "},
       {"strides", strides, kInvalid, "op.d.strides: "},
       {"offset", [](v1::GemmRequest& request) { D(request).set_byte_offset(4); }, kInvalid, "op.d.byte_offset: "},
       {"beyond the limit", result(600, 600), StatusCode::RESOURCE_EXHAUSTED, "op.d: ", "inline_bytes_max"},
       {"2^53 bytes", result((std::int64_t{1} << 31) - 1, std::int64_t{1} << 20), StatusCode::RESOURCE_EXHAUSTED,
        "op.d: ", "inline_bytes_max"}});
}

// A view needs its bytes within the storage and says nothing about bytes behind them.
TEST_F(BadCallTest, MoreInlineDataThanTheViewReadsComputes) {
  GoodCall good = operands_->Inline();
  for (std::size_t i = 0; i + 1 < AllOperands().size(); ++i) {
    v1::Tensor& tensor = AllOperands()[i].of(good.request);
    tensor.set_inline_data(std::string(8, 'x') + tensor.inline_data() + std::string(kK, 'x'));
    tensor.set_byte_offset(8);
  }
  ExpectRight(good);
}

TEST_F(BadCallTest, OptionsAreKnownAndServed) {
  const StatusCode later = StatusCode::UNIMPLEMENTED;
  const auto reply_when = [](int value) {
    return Options([=](v1::SubmitOptions& options) { options.set_reply_when(static_cast<v1::ReplyWhen>(value)); });
  };
  const auto backend = [](int value) {
    return Options([=](v1::SubmitOptions& options) { options.set_backend(static_cast<v1::Backend>(value)); });
  };
  const auto points = [](int count, auto add) {
    return Options([=](v1::SubmitOptions& options) {
      for (int i = 0; i < count; ++i) (options.*add)()->set_id(std::string(16, '\0'));
    });
  };
  v1::SyncPoint* (v1::SubmitOptions::*const add_wait)() = &v1::SubmitOptions::add_wait;
  v1::SyncPoint* (v1::SubmitOptions::*const add_signal)() = &v1::SubmitOptions::add_signal;
  std::vector<BadGemm> rows = {
      {"stream", Options([](v1::SubmitOptions& options) { options.set_stream("s"); }), kInvalid, "options.stream: "},
      {"unknown stream", Options([](v1::SubmitOptions& options) { options.set_stream(std::string(16, '\0')); }),
       StatusCode::NOT_FOUND, "options.stream: "},
      {"wait", Options([](v1::SubmitOptions& options) { options.add_wait(); }), kInvalid, "options.wait[0].id: "},
      {"unknown wait", points(1, add_wait), StatusCode::NOT_FOUND, "options.wait[0].id: "},
      {"17 waits", points(17, add_wait), kInvalid, "options.wait: ", "at most 16"},
      {"signal", Options([](v1::SubmitOptions& options) { options.add_signal(); }), kInvalid, "options.signal[0].id: "},
      {"unknown signal", points(1, add_signal), StatusCode::NOT_FOUND, "options.signal[0].id: "},
      {"17 signals", points(17, add_signal), kInvalid, "options.signal: ", "at most 16"},
      {"reply_when 99", reply_when(99), kInvalid, "options.reply_when: ", "99"},
      {"reply_when -1", reply_when(-1), kInvalid, "options.reply_when: ", "-1"},
      {"backend 99", backend(99), kInvalid, "options.backend: ", "99"},
      {"backend -1", backend(-1), kInvalid, "options.backend: ", "-1"}};
  const v1::ServerInfoReply info = client_->ServerInfo().value();
  for (const v1::BackendInfo& known : info.backends()) {
    if (known.available()) continue;
    const int value = known.name() == "cuda" ? v1::BACKEND_CUDA : v1::BACKEND_VENDOR;
    rows.push_back({known.name(), backend(value), later, "options.backend: ", known.name()});
  }
  ExpectEach(operands_->Full(), rows);
  rows.push_back({"reply_when ENQUEUED", reply_when(v1::REPLY_WHEN_ENQUEUED), kInvalid, "options.reply_when: "});
  ExpectEach(operands_->Inline(), rows);
}

TEST_F(BadCallTest, TheSessionsToken) {
  const auto flipped = [this](std::size_t byte) {
    std::string token = session_->token();
    token[byte] = static_cast<char>(token[byte] ^ 0x40);
    return token;
  };
  client::Session closed = client_->OpenSession("closed").value();
  ASSERT_TRUE(closed.Close().ok());
  const std::string metadata = "metadata tessera-session-bin: ";
  const GoodCall full = operands_->Full();
  const GoodCall in_message = operands_->Inline();
  const struct {
    std::string what;
    GoodCall good;
    std::optional<std::string> token;
    StatusCode code;
    std::string begins;
  } rows[] = {
      {"none", full, std::nullopt, kInvalid,
       "op.a.buffer_id: a call that names buffers needs metadata tessera-session"},
      {"empty", full, "", kInvalid, metadata},
      {"15 bytes", full, session_->token().substr(1), kInvalid, metadata},
      {"17 bytes", full, session_->token() + "x", kInvalid, metadata},
      {"4000 bytes", full, std::string(4'000, 'x'), kInvalid, metadata},
      {"17 bytes, not needed", in_message, session_->token() + "x", kInvalid, metadata},
      {"zeros", full, std::string(16, '\0'), StatusCode::NOT_FOUND, metadata},
      {"other epoch", full, flipped(0), StatusCode::FAILED_PRECONDITION, metadata},
      {"other index", full, flipped(4), StatusCode::NOT_FOUND, metadata},
      {"other nonce", full, flipped(15), StatusCode::NOT_FOUND, metadata},
      {"unknown, not needed", in_message, flipped(15), StatusCode::NOT_FOUND, metadata},
      {"a buffer's id", full, operands_->id(), StatusCode::NOT_FOUND, metadata},
      {"closed", full, closed.token(), StatusCode::NOT_FOUND, metadata},
      {"the other session's", full, other_session_->token(), StatusCode::PERMISSION_DENIED, "op.a.buffer_id: "}};
  for (const auto& row : rows) {
    SCOPED_TRACE(row.what);
    ExpectNothingChanges(row.good, [&] { ExpectRefused(Gemm(row.good.request, row.token), row.code, row.begins); });
  }
}

TEST_F(BadCallTest, MessagesAreBounded) {
  const std::uint64_t limit = client_->ServerInfo().value().message_bytes_max();
  const auto grown = [&](std::uint64_t bytes) {
    v1::GemmRequest request = operands_->Inline().request;
    A(request).clear_inline_data();
    const std::uint64_t rest = request.ByteSizeLong() + 20;  // the data comes with a few bytes for its length
    A(request).set_inline_data(std::string(bytes - rest, 'x'));
    return request;
  };
  ASSERT_LE(grown(limit).ByteSizeLong(), limit);
  ASSERT_GT(grown(limit + 64).ByteSizeLong(), limit);
  ExpectNothingChanges(operands_->Inline(), [&] {
    ExpectRefused(Gemm(grown(limit)), StatusCode::RESOURCE_EXHAUSTED, "op.a: ", "inline_bytes_max");
  });
  for (const std::uint64_t bytes : {limit + 64, 4 * limit}) {
    SCOPED_TRACE(bytes);
    ExpectNothingChanges(operands_->Full(), [&] {
      ExpectRefused(Gemm(grown(bytes)), StatusCode::RESOURCE_EXHAUSTED, "", std::to_string(limit));
    });
  }
}

TEST_F(BadCallTest, GarbageIsAnsweredClearly) {
  const GoodCall good = operands_->Full();
  const std::string bytes = good.request.SerializeAsString();
  std::vector<std::pair<std::string, std::string>> rows = {
      {"ones", std::string(7, '\xff')},
      {"an endless varint", std::string(64, '\x80')},
      {"a length of 2^31", std::string("\x0a\xff\xff\xff\xff\x07")},
      {"field number 0", std::string("\x00\x01", 2)},
      {"a reserved wire type", std::string("\x0f\x01")},
      {"an end without its group", std::string("\x0c")},
      {"1 MiB of ones", std::string(1U << 20U, '\xff')},
      {"a good request with more", bytes + "\xff"}};
  for (std::size_t length = 1; length < bytes.size(); length += 7) {
    rows.emplace_back("a good request's first " + std::to_string(length) + " bytes", bytes.substr(0, length));
  }
  for (const auto& [what, garbage] : rows) {
    SCOPED_TRACE(what);
    ExpectNothingChanges(good, [&] { ExpectRefused(Raw(kGemm, garbage), kInvalid, "", "message"); });
  }
}

// Any bit of a good request may tip over: what is refused changes nothing, what computes writes within the buffer.
TEST_F(BadCallTest, DamagedRequestsAreRefusedOrCompute) {
  const GoodCall good = operands_->Full();
  const std::string bytes = good.request.SerializeAsString();
  const std::string before = IdleState();
  std::mt19937 random(4711);
  int refused = 0;
  for (int i = 0; i < 1'000; ++i) {
    SCOPED_TRACE(i);
    std::string damaged = bytes;
    const std::size_t bit = random() % (8 * bytes.size());
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1U << bit % 8));
    const grpc::Status status = Raw(kGemm, damaged);
    if (status.ok()) {
      operands_->Restore();
      continue;
    }
    ++refused;
    EXPECT_NE(status.error_code(), StatusCode::UNKNOWN) << status.error_message();
    EXPECT_NE(status.error_code(), StatusCode::INTERNAL) << status.error_message();
    EXPECT_NE(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
    operands_->ExpectUntouched();
  }
  EXPECT_GT(refused, 500);
  EXPECT_EQ(State(), before);
  foreign_->ExpectUntouched();
  ExpectRight(good);
}

TEST_F(BadCallTest, UnknownMethodsAreUnimplemented) {
  const GoodCall good = operands_->Full();
  for (const char* method : {"/tessera.v1.Compute/Nothing", "/tessera.v1.Nothing/Gemm", "/tessera.v2.Compute/Gemm",
                             "/Gemm", "/tessera.v1.Compute/gemm", "/"}) {
    SCOPED_TRACE(method);
    ExpectNothingChanges(
        good, [&] { ExpectRefused(Raw(method, good.request.SerializeAsString()), StatusCode::UNIMPLEMENTED, ""); });
  }
  EXPECT_TRUE(Raw(kGemm, good.request.SerializeAsString()).ok());
}

TEST_F(BadCallTest, FieldsOfALaterVersionArePassedOver) {
  for (GoodCall good : {operands_->Full(), operands_->Plain(), operands_->Inline()}) {
    good.request.mutable_options();
    AddUnknownFields(good.request);
    ExpectRight(good);
  }
}

}  // namespace
}  // namespace tessera::e2e
