// What the daemon says about itself: Admin and Memory.ListBuffers, health, reflection, metrics.

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <regex>
#include <set>

#include "server/config/settings.h"
#include "tessera/v1/compute.pb.h"
#include "tessera/v1/planner.pb.h"
#include "tests/e2e/daemon_fixture.h"

namespace tessera::e2e {
namespace {

using google::protobuf::UnknownFieldSet;
using ::testing::HasSubstr;

constexpr int kServing = 1;  // grpc.health.v1.HealthCheckResponse.ServingStatus

class ServingTest : public DaemonFixture {};

// One request, one reply of a service whose messages have no header here: they are read and written by field number.
// A bidirectional method sees a stream of one request.
grpc::Status CallByName(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                        const UnknownFieldSet& request, UnknownFieldSet& reply) {
  std::string bytes;
  request.SerializeToString(&bytes);
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request_buffer(&slice, 1);
  grpc::ByteBuffer reply_buffer;
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  std::promise<grpc::Status> done;
  stub.UnaryCall(&context, method, grpc::StubOptions(), &request_buffer, &reply_buffer,
                 [&done](grpc::Status status) { done.set_value(std::move(status)); });
  grpc::Status status = done.get_future().get();
  grpc::Slice reply_slice;
  if (status.ok() && reply_buffer.DumpToSingleSlice(&reply_slice).ok()) {
    EXPECT_TRUE(reply.ParseFromArray(reply_slice.begin(), static_cast<int>(reply_slice.size())));
  }
  return status;
}

// The fields numbered `number` of a message.
std::vector<const google::protobuf::UnknownField*> FieldsOf(const UnknownFieldSet& message, int number) {
  std::vector<const google::protobuf::UnknownField*> fields;
  for (int i = 0; i < message.field_count(); ++i) {
    if (message.field(i).number() == number) fields.push_back(&message.field(i));
  }
  return fields;
}

// Compute, Memory, Admin and Planner.
std::vector<const google::protobuf::ServiceDescriptor*> Services() {
  std::vector<const google::protobuf::ServiceDescriptor*> services;
  for (const google::protobuf::Descriptor* message :
       {v1::GemmRequest::descriptor(), v1::ListBuffersRequest::descriptor(), v1::DrainRequest::descriptor(),
        v1::ProbeRequest::descriptor()}) {
    for (int i = 0; i < message->file()->service_count(); ++i) services.push_back(message->file()->service(i));
  }
  return services;
}

TEST_F(ServingTest, ServerInfoTellsWhoServesWhereAndToWhom) {
  const client::Client client = Connect();
  const v1::ServerInfoReply info = client.ServerInfo().value();
  EXPECT_EQ(info.version(), server::Version());
  EXPECT_TRUE(std::regex_match(info.epoch(), std::regex("[0-9a-f]{8}"))) << info.epoch();
  EXPECT_EQ(info.pid(), ::getpid());
  EXPECT_EQ(info.state(), "serving");
  EXPECT_EQ(info.default_backend(), "cpu");
  EXPECT_EQ(info.isolation_mode(), "none");
  EXPECT_EQ(info.socket(), socket());
  EXPECT_EQ(info.side_channel(), socket() + ".side");
  EXPECT_EQ(info.http_address(), daemon().http_address());
  EXPECT_EQ(info.inline_bytes_max(), server::Settings().inline_bytes_max);
  EXPECT_EQ(info.message_bytes_max(), server::Settings().message_bytes_max);
  EXPECT_EQ(info.principal(), "uid:" + std::to_string(::getuid()));
  EXPECT_TRUE(info.administrator());
  EXPECT_EQ(info.log_level(), "error");
  EXPECT_EQ(info.sessions(), 0U);
  EXPECT_EQ(info.buffers(), 0U);
  EXPECT_EQ(info.buffer_bytes(), 0U);
  EXPECT_EQ(info.in_flight(), 0U);

  std::set<std::string> names;
  for (const v1::BackendInfo& backend : info.backends()) {
    names.insert(backend.name());
    EXPECT_FALSE(backend.reason().empty()) << backend.name();
    if (backend.name() != "cpu") continue;
    EXPECT_TRUE(backend.available());
    EXPECT_GT(backend.variants(), 0U);
  }
  EXPECT_EQ(names, (std::set<std::string>{"cpu", "cuda", "vendor"}));
}

TEST_F(ServingTest, ServerInfoCountsSessionsAndBuffers) {
  const client::Client client = Connect();
  client::Client other = Connect();
  client::Session session = other.OpenSession("counted").value();
  const client::Buffer buffer = session.Allocate(12345).value();
  const v1::ServerInfoReply info = client.ServerInfo().value();
  EXPECT_EQ(info.sessions(), 1U);
  EXPECT_EQ(info.buffers(), 1U);
  EXPECT_GE(info.buffer_bytes(), 12345U);
}

TEST_F(ServingTest, EpochChangesWithEveryStartAndUptimeGrows) {
  const std::string before = Connect().ServerInfo().value().epoch();
  StartDaemon();
  const client::Client client = Connect();
  EXPECT_NE(client.ServerInfo().value().epoch(), before);
  EXPECT_TRUE(Eventually(std::chrono::seconds(2), [&] { return client.ServerInfo().value().uptime_ms() >= 20; }));
}

TEST_F(ServingTest, HealthIsServingForEveryServiceAndUnknownElsewhere) {
  const client::Client client = Connect();
  const auto check = [&](const std::string& service, UnknownFieldSet& reply) {
    UnknownFieldSet request;
    request.AddLengthDelimited(1)->assign(service);
    return CallByName(client.channel(), "/grpc.health.v1.Health/Check", request, reply);
  };
  std::vector<std::string> services = {""};
  for (const auto* service : Services()) services.push_back(service->full_name());
  for (const std::string& service : services) {
    UnknownFieldSet reply;
    const grpc::Status status = check(service, reply);
    ASSERT_TRUE(status.ok()) << service << ": " << status.error_message();
    const auto fields = FieldsOf(reply, 1);
    ASSERT_EQ(fields.size(), 1U) << service;
    EXPECT_EQ(fields[0]->varint(), static_cast<std::uint64_t>(kServing)) << service;
  }
  UnknownFieldSet reply;
  EXPECT_EQ(check("tessera.v1.Nothing", reply).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServingTest, HealthAndReadinessDropWhenDraining) {
  const client::Client client = Connect();
  EXPECT_EQ(HttpGet(daemon().http_address(), "/readyz").code, 200);
  EXPECT_EQ(HttpGet(daemon().http_address(), "/healthz").code, 200);
  daemon().RequestDrain();
  EXPECT_EQ(HttpGet(daemon().http_address(), "/readyz").code, 503);
  EXPECT_EQ(HttpGet(daemon().http_address(), "/healthz").code, 200);
  EXPECT_EQ(MetricSum(Metrics(), "tessera_ready"), 0);
  EXPECT_EQ(client.ServerInfo().value().state(), "draining");
  UnknownFieldSet request;
  request.AddLengthDelimited(1)->assign("tessera.v1.Compute");
  UnknownFieldSet reply;
  ASSERT_TRUE(CallByName(client.channel(), "/grpc.health.v1.Health/Check", request, reply).ok());
  const auto fields = FieldsOf(reply, 1);
  ASSERT_EQ(fields.size(), 1U);
  EXPECT_NE(fields[0]->varint(), static_cast<std::uint64_t>(kServing));
}

TEST_F(ServingTest, ReflectionListsTheServices) {
  const client::Client client = Connect();
  UnknownFieldSet request;
  request.AddLengthDelimited(7)->assign("");  // ServerReflectionRequest.list_services
  UnknownFieldSet reply;
  const grpc::Status status =
      CallByName(client.channel(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", request, reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const auto lists = FieldsOf(reply, 6);  // ServerReflectionResponse.list_services_response
  ASSERT_EQ(lists.size(), 1U);
  UnknownFieldSet list;
  ASSERT_TRUE(list.ParseFromString(lists[0]->length_delimited()));
  std::set<std::string> names;
  for (const auto* service : FieldsOf(list, 1)) {
    UnknownFieldSet fields;
    ASSERT_TRUE(fields.ParseFromString(service->length_delimited()));
    for (const auto* name : FieldsOf(fields, 1)) names.insert(name->length_delimited());
  }
  for (const auto* service : Services()) EXPECT_TRUE(names.contains(service->full_name())) << service->full_name();
}

// A tool that knows nothing of the services must get from names to all their messages, and a clear answer to a wrong
// name.
TEST_F(ServingTest, ReflectionDescribesWhatItLists) {
  const client::Client client = Connect();
  const auto ask = [&](int field, const std::string& text, int answer) {
    UnknownFieldSet request;
    request.AddLengthDelimited(field)->assign(text);
    UnknownFieldSet reply;
    const grpc::Status status =
        CallByName(client.channel(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", request, reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    auto answered = std::make_unique<UnknownFieldSet>();
    for (const auto* message : FieldsOf(reply, answer)) answered->ParseFromString(message->length_delimited());
    return answered;
  };
  constexpr int kFileByFilename = 3;
  constexpr int kFileContainingSymbol = 4;
  constexpr int kExtensionNumbersOfType = 6;
  constexpr int kFiles = 4;
  constexpr int kNumbers = 5;
  constexpr int kError = 7;
  for (const auto* service : Services()) {
    google::protobuf::DescriptorPool pool;
    const auto files = ask(kFileContainingSymbol, service->full_name(), kFiles);
    const auto descriptions = FieldsOf(*files, 1);
    for (auto file = descriptions.rbegin(); file != descriptions.rend(); ++file) {  // what others import comes last
      google::protobuf::FileDescriptorProto description;
      ASSERT_TRUE(description.ParseFromString((*file)->length_delimited()));
      EXPECT_NE(pool.BuildFile(description), nullptr) << description.name();
    }
    EXPECT_NE(pool.FindServiceByName(service->full_name()), nullptr) << service->full_name();
  }
  EXPECT_EQ(FieldsOf(*ask(kFileByFilename, "tessera/v1/types.proto", kFiles), 1).size(), 1U);
  const auto numbers = ask(kExtensionNumbersOfType, "tessera.v1.Tensor", kNumbers);
  ASSERT_EQ(FieldsOf(*numbers, 1).size(), 1U);
  EXPECT_EQ(FieldsOf(*numbers, 1)[0]->length_delimited(), "tessera.v1.Tensor");
  for (const int field : {kFileByFilename, kFileContainingSymbol, kExtensionNumbersOfType}) {
    const auto error = ask(field, "no.such.Thing", kError);
    ASSERT_EQ(FieldsOf(*error, 1).size(), 1U);
    ASSERT_EQ(FieldsOf(*error, 2).size(), 1U);
    EXPECT_EQ(FieldsOf(*error, 1)[0]->varint(), static_cast<std::uint64_t>(grpc::StatusCode::NOT_FOUND));
    EXPECT_THAT(FieldsOf(*error, 2)[0]->length_delimited(), HasSubstr("no.such.Thing"));
  }
}

TEST_F(ServingTest, GetConfigListsEverySettingInOrder) {
  StartDaemon({{"cpu_threads", "1"}});
  const client::Client client = Connect();
  const v1::GetConfigReply config = client.GetConfig().value();
  const auto rows = server::SettingRows();
  ASSERT_EQ(static_cast<std::size_t>(config.settings_size()), rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const v1::Setting& setting = config.settings(static_cast<int>(i));
    EXPECT_EQ(setting.name(), rows[i].name);
    EXPECT_EQ(setting.unit(), rows[i].unit);
    EXPECT_EQ(setting.help(), rows[i].help);
    if (setting.name() == "cpu_threads") {
      EXPECT_EQ(setting.value(), "1");
      EXPECT_EQ(setting.default_value(), "0");
      EXPECT_EQ(setting.source(), "flag");
    }
    if (setting.name() == "queue_max") {
      EXPECT_EQ(setting.source(), "default");
    }
  }
}

TEST_F(ServingTest, SetLogLevelChangesTheLevelAndRefusesRubbish) {
  const client::Client client = Connect();
  EXPECT_EQ(client.SetLogLevel("off").value(), "error");
  EXPECT_EQ(client.ServerInfo().value().log_level(), "off");
  const auto refused = client.SetLogLevel("shout");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << refused.status();
  EXPECT_THAT(Text(refused.status()), HasSubstr("shout"));
  EXPECT_EQ(client.ServerInfo().value().log_level(), "off");
  EXPECT_EQ(client.SetLogLevel("error").value(), "off");
}

TEST_F(ServingTest, ListBuffersTellsOwnerSizeAndOrigin) {
  client::Client client = Connect();
  client::Session session = client.OpenSession("lister").value();
  const client::Buffer allocated = session.Allocate(4096).value();
  const client::Buffer shared = session.Share(8192).value();
  for (const bool all : {false, true}) {
    const v1::ListBuffersReply list = client.ListBuffers(all).value();
    ASSERT_EQ(list.buffers_size(), 2);
    for (const v1::BufferInfo& buffer : list.buffers()) {
      const bool is_allocated = buffer.buffer_id() == allocated.id();
      EXPECT_TRUE(is_allocated || buffer.buffer_id() == shared.id());
      EXPECT_EQ(buffer.bytes(), is_allocated ? 4096U : 8192U);
      EXPECT_EQ(buffer.origin(), is_allocated ? v1::BUFFER_ORIGIN_ALLOCATED : v1::BUFFER_ORIGIN_IMPORTED);
      EXPECT_EQ(buffer.space(), "host");
      EXPECT_EQ(buffer.references(), 0U);
      EXPECT_EQ(buffer.principal(), "uid:" + std::to_string(::getuid()));
      EXPECT_EQ(buffer.owner_pid(), ::getpid());
      EXPECT_EQ(buffer.session_label(), "lister");
    }
  }
}

TEST_F(ServingTest, MetricsCountTheCallsJustMade) {
  const client::Client client = Connect();
  const auto count = [this](const std::string& method, const std::string& code) {
    return MetricSum(Metrics(), "tessera_rpcs_total", {"method=\"" + method + "\"", "code=\"" + code + "\""});
  };
  const double infos = count("Admin.ServerInfo", "OK");
  const double configs = count("Admin.GetConfig", "OK");
  const double refusals = count("Admin.SetLogLevel", "INVALID_ARGUMENT");
  ASSERT_GE(infos, 0);
  EXPECT_EQ(configs, 0);
  EXPECT_EQ(refusals, 0);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(client.ServerInfo().ok());
  ASSERT_TRUE(client.GetConfig().ok());
  ASSERT_FALSE(client.SetLogLevel("shout").ok());
  EXPECT_EQ(count("Admin.ServerInfo", "OK"), infos + 3);
  EXPECT_EQ(count("Admin.GetConfig", "OK"), 1);
  EXPECT_EQ(count("Admin.SetLogLevel", "INVALID_ARGUMENT"), 1);
  EXPECT_EQ(MetricSum(Metrics(), "tessera_ready"), 1);
}

TEST_F(ServingTest, MetricsKnowEveryRpcAndNoOther) {
  std::set<std::string> rpcs;
  for (const auto* service : Services()) {
    for (int i = 0; i < service->method_count(); ++i) rpcs.insert(service->name() + "." + service->method(i)->name());
  }
  ASSERT_EQ(Services().size(), 4U);
  std::set<std::string> labels;
  const std::string metrics = Metrics();
  const std::regex label("\\btessera_rpcs_total\\{[^}]*method=\"([^\"]+)\"");
  for (std::sregex_iterator at(metrics.begin(), metrics.end(), label), end; at != end; ++at) labels.insert((*at)[1]);
  EXPECT_EQ(labels, rpcs);
}

TEST_F(ServingTest, ConnectingToNobodyIsUnavailableAndSaysWhat) {
  const std::string nobody = directory().File("nobody.sock");
  const auto client =
      client::Client::Connect({.socket = nobody, .side_channel = {}, .timeout = std::chrono::milliseconds(200)});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable) << client.status();
  EXPECT_THAT(Text(client.status()), HasSubstr(nobody));
}

}  // namespace
}  // namespace tessera::e2e
