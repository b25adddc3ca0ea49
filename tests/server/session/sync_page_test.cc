// Exported timelines as others see them, by bytes of the page's memory: layout, values that a client writes, errors
// that are there before the value that tells of them, the order in which they come, and the poller that sees all this.
#include "server/session/sync_page.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/shared_thread.h"
#include "common/sync_slot.h"
#include "server/session/sync_poller.h"
#include "server/session/timeline.h"
#include "tests/server/session/fake_device_memory.h"
#include "tests/server/session/posix_fixtures.h"
#include "tests/server/session/session_fixtures.h"

namespace tessera::server {
namespace {

using absl::StatusCode;
using ::testing::Each;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kGone = 0x7fff'ffff'ffff'ffff;  // as side_channel.proto has it
constexpr auto kSoon = 5s;  // a poller looks every millisecond, and a busy machine stalls for longer than that

std::optional<StatusCode> CodeAt(const Timeline& timeline, std::uint64_t value) {
  const std::optional<absl::Status> reached = timeline.Reached(value);
  return reached.has_value() ? std::optional<StatusCode>(reached->code()) : std::nullopt;
}

// The error that a client finds; (0, 0) is none.
struct ShownError {
  std::uint64_t value = 0;
  std::uint32_t code = 0;
  friend bool operator==(const ShownError&, const ShownError&) = default;
  friend std::ostream& operator<<(std::ostream& out, const ShownError& error) {
    return out << "code " << error.code << " at " << error.value;
  }
};

ShownError ErrorAt(std::uint64_t value, StatusCode code) {
  return {.value = value, .code = static_cast<std::uint32_t>(code)};
}

// A page as a client maps it, which knows no more than the descriptor and the offsets of side_channel.proto.
class ClientsMapping {
 public:
  explicit ClientsMapping(int fd)
      : memory_(static_cast<char*>(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0))) {
    EXPECT_NE(static_cast<void*>(memory_), MAP_FAILED);
  }
  ClientsMapping(const ClientsMapping&) = delete;
  ClientsMapping& operator=(const ClientsMapping&) = delete;
  ~ClientsMapping() { ::munmap(memory_, 4096); }

  std::uint64_t Value(std::uint64_t slot) const { return Word(slot).load(std::memory_order_acquire); }
  void Write(std::uint64_t slot, std::uint64_t value) { Word(slot).store(value, std::memory_order_release); }
  void Raise(std::uint64_t slot, std::uint64_t value) {
    const std::atomic_ref<std::uint64_t> word = Word(slot);
    std::uint64_t seen = word.load();
    while (seen < value && !word.compare_exchange_weak(seen, value)) {
    }
  }
  ShownError Error(std::uint64_t slot) const {
    const std::uint32_t code =
        std::atomic_ref(*reinterpret_cast<std::uint32_t*>(memory_ + slot + 16)).load(std::memory_order_acquire);
    const std::uint64_t value =
        std::atomic_ref(*reinterpret_cast<std::uint64_t*>(memory_ + slot + 8)).load(std::memory_order_relaxed);
    return {.value = value, .code = code};
  }
  std::vector<char> Bytes(std::uint64_t slot) const { return {memory_ + slot, memory_ + slot + 64}; }

 private:
  std::atomic_ref<std::uint64_t> Word(std::uint64_t slot) const {
    return std::atomic_ref(*reinterpret_cast<std::uint64_t*>(memory_ + slot));
  }

  char* const memory_;
};

std::shared_ptr<SyncPage> MakePage(const std::vector<DeviceMemory*>& devices = {}) {
  auto page = SyncPage::Make(devices);
  EXPECT_TRUE(page.ok()) << page.status();
  return page.ok() ? std::shared_ptr<SyncPage>(*std::move(page)) : nullptr;
}

// Random unless TESSERA_TEST_SEED says otherwise; printed either way.
std::uint64_t TestSeed() {
  const char* const given = std::getenv("TESSERA_TEST_SEED");
  const std::uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::cout << "TESSERA_TEST_SEED=" << seed << "\n";
  return seed;
}

class SyncPageTest : public ::testing::Test {
 protected:
  std::shared_ptr<Timeline> Make(std::uint64_t value = 0) {
    std::optional<SharedWord> word = page_->Take(value);
    EXPECT_TRUE(word.has_value());
    return word.has_value() ? std::make_shared<Timeline>(*std::move(word), poller_) : nullptr;
  }
  std::uint64_t Shown(const Timeline& timeline) const { return client_.Value(timeline.word()->byte_offset()); }
  ShownError ErrorOf(const Timeline& timeline) const { return client_.Error(timeline.word()->byte_offset()); }
  void Write(const Timeline& timeline, std::uint64_t value) { client_.Write(timeline.word()->byte_offset(), value); }

  std::shared_ptr<SyncPoller> poller_ = std::make_shared<SyncPoller>();
  std::shared_ptr<SyncPage> page_ = MakePage();
  ClientsMapping client_{page_->fd()};
};

TEST_F(SyncPageTest, IsOnePageThatNobodyCanResize) {
  struct stat file {};
  ASSERT_EQ(::fstat(page_->fd(), &file), 0);
  EXPECT_EQ(file.st_size, 4096);
  EXPECT_EQ(SyncPage::kBytes, 4096U);
  EXPECT_EQ(SyncPage::kSlots, 64U);
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_WRITE;
  EXPECT_EQ(::fcntl(page_->fd(), F_GET_SEALS) & kSeals, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  EXPECT_NE(::ftruncate(page_->fd(), 0), 0);
  EXPECT_NE(::ftruncate(page_->fd(), 8192), 0);
  EXPECT_EQ(::fcntl(page_->fd(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST_F(SyncPageTest, HasSixtyFourPlaces) {
  std::vector<SharedWord> words;
  for (std::uint64_t i = 0; i < 64; ++i) {
    std::optional<SharedWord> word = page_->Take(100 + i);
    ASSERT_TRUE(word.has_value());
    EXPECT_EQ(word->page(), page_);
    words.push_back(*std::move(word));
  }
  EXPECT_FALSE(page_->Take(0).has_value());
  std::set<std::uint64_t> places;
  for (std::uint64_t i = 0; i < 64; ++i) {
    places.insert(words[i].byte_offset());
    EXPECT_EQ(words[i].Load(), 100 + i);
    EXPECT_EQ(client_.Value(words[i].byte_offset()), 100 + i);
  }
  EXPECT_EQ(places.size(), 64U);
  EXPECT_EQ(*places.rbegin(), 64U * 63U);
  for (const std::uint64_t place : places) EXPECT_EQ(place % 64, 0U);
  words.pop_back();
  EXPECT_TRUE(page_->Take(0).has_value());
}

TEST_F(SyncPageTest, APlaceIsTakenAsNew) {
  std::uint64_t place = 0;
  {
    const std::shared_ptr<Timeline> first = Make(7);
    place = first->word()->byte_offset();
    first->Signal(9, absl::InternalError("failed"));
    first->Close(absl::AbortedError("gone"));
    EXPECT_EQ(client_.Value(place), kGone);
  }
  const std::shared_ptr<Timeline> second = Make(2);
  ASSERT_EQ(second->word()->byte_offset(), place);
  std::vector<char> bytes(64, 0);
  bytes[0] = 2;
  EXPECT_EQ(client_.Bytes(place), bytes);
  EXPECT_EQ(CodeAt(*second, 2), StatusCode::kOk);
  EXPECT_EQ(CodeAt(*second, 3), std::nullopt);
}

// Byte by byte, since clients in other languages go by it.
TEST_F(SyncPageTest, TheLayoutIsTheContract) {
  const std::shared_ptr<Timeline> other = Make(0);
  const std::shared_ptr<Timeline> timeline = Make(0x0102'0304'0506'0708);
  const std::uint64_t slot = timeline->word()->byte_offset();
  ASSERT_EQ(slot, 64U);
  const auto expect_bytes = [&](std::uint64_t value, std::uint64_t error_value, std::uint32_t error_code) {
    std::vector<char> bytes(64, 0);
    std::memcpy(bytes.data(), &value, 8);
    std::memcpy(bytes.data() + 8, &error_value, 8);
    std::memcpy(bytes.data() + 16, &error_code, 4);
    EXPECT_EQ(client_.Bytes(slot), bytes);
  };
  expect_bytes(0x0102'0304'0506'0708, 0, 0);
  timeline->Signal(0x1112'1314'1516'1718, absl::OkStatus());
  expect_bytes(0x1112'1314'1516'1718, 0, 0);
  timeline->Signal(0x2122'2324'2526'2728, absl::ResourceExhaustedError("full"));
  expect_bytes(0x2122'2324'2526'2728, 0x2122'2324'2526'2728, 8);
  timeline->Close(absl::AbortedError("gone"));
  expect_bytes(kGone, 0x2122'2324'2526'2728, 8);
  EXPECT_THAT(client_.Bytes(other->word()->byte_offset()), Each(0));
}

// Registers memory, counts that, and may refuse.
class RegisteringGpu final : public DeviceMemory {
 public:
  explicit RegisteringGpu(std::string uuid, bool refuses = false) : uuid_(std::move(uuid)), refuses_(refuses) {}

  const std::string& uuid() const override { return uuid_; }
  std::uint64_t granularity() const override { return 4096; }
  absl::StatusOr<std::unique_ptr<Mapping>> Allocate(std::uint64_t /*bytes*/) override { return None(); }
  absl::StatusOr<std::unique_ptr<Mapping>> ImportLegacy(const LegacyHandle& /*handle*/) override { return None(); }
  absl::StatusOr<std::unique_ptr<Mapping>> ImportDescriptor(UniqueFd /*fd*/, std::uint64_t /*bytes*/) override {
    return None();
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> ImportEvent(const LegacyHandle& /*handle*/) override { return None(); }
  absl::StatusOr<std::unique_ptr<HostRegistration>> RegisterHost(std::byte* memory, std::uint64_t bytes) override {
    if (refuses_) return absl::ResourceExhaustedError("no more");
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 4096, 0U);
    EXPECT_EQ(bytes, 4096U);
    return std::make_unique<Registration>(*this, memory);
  }

  static constexpr std::uint64_t kOffset = 0x7000'0000;  // the GPU's address of a page is another than the host's
  std::byte* registered = nullptr;
  int registrations = 0;

 private:
  class Registration final : public HostRegistration {
   public:
    Registration(RegisteringGpu& gpu, std::byte* memory)
        : HostRegistration(reinterpret_cast<std::uintptr_t>(memory) + kOffset), gpu_(gpu), memory_(memory) {
      gpu.registered = memory;
      ++gpu.registrations;
    }
    ~Registration() override {
      static_cast<void>(std::atomic_ref(*memory_).load());  // a crash, if it is unmapped by now
      --gpu_.registrations;
    }

   private:
    RegisteringGpu& gpu_;
    std::byte* const memory_;
  };
  static absl::Status None() { return absl::UnimplementedError("a GPU for registering only"); }

  const std::string uuid_;
  const bool refuses_;
};

TEST_F(SyncPageTest, EachGpuHasItsAddressOfAWord) {
  RegisteringGpu first("GPU-1"), second("GPU-2");
  {
    const std::shared_ptr<SyncPage> page = MakePage({&first, &second});
    EXPECT_EQ(first.registrations, 1);
    EXPECT_EQ(second.registrations, 1);
    std::vector<SharedWord> words;
    for (std::uint64_t i = 0; i < 3; ++i) words.push_back(*page->Take(40 + i));
    for (std::uint64_t i = 0; i < 3; ++i) {
      for (const RegisteringGpu* gpu : {&first, &second}) {
        const auto address = words[i].AddressOn(MemorySpace::Gpu(gpu->uuid()));
        ASSERT_TRUE(address.has_value());
        EXPECT_EQ(*reinterpret_cast<const std::uint64_t*>(*address - RegisteringGpu::kOffset), 40 + i);
      }
      EXPECT_EQ(words[i].AddressOn(MemorySpace::Gpu("GPU-3")), std::nullopt);
      EXPECT_EQ(words[i].AddressOn(MemorySpace()), std::nullopt);
    }
  }
  EXPECT_EQ(first.registrations, 0);
  EXPECT_EQ(second.registrations, 0);
}

TEST_F(SyncPageTest, APageThatAGpuRefusesIsNotThere) {
  RegisteringGpu first("GPU-1"), second("GPU-2", /*refuses=*/true);
  const std::size_t descriptors = OpenDescriptors();
  const auto page = SyncPage::Make({&first, &second});
  EXPECT_EQ(CodeOf(page), StatusCode::kResourceExhausted);
  EXPECT_EQ(first.registrations, 0);
  EXPECT_NE(first.registered, nullptr);
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

TEST_F(SyncPageTest, APageStaysForItsWordsAndThenGoes) {
  const std::size_t descriptors = OpenDescriptors();
  std::shared_ptr<SyncPage> page = MakePage();
  std::optional<SharedWord> word = page->Take(1);
  page.reset();
  EXPECT_EQ(OpenDescriptors(), descriptors + 1);
  word->Raise(5);
  EXPECT_EQ(word->Load(), 5U);
  word.reset();
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

class ExportedTimelineTest : public SyncPageTest {};

TEST_F(ExportedTimelineTest, BeginsAtItsValue) {
  const std::shared_ptr<Timeline> timeline = Make(7);
  EXPECT_NE(timeline->word(), nullptr);
  EXPECT_EQ(timeline->value(), 7U);
  EXPECT_EQ(CodeAt(*timeline, 7), StatusCode::kOk);
  EXPECT_EQ(CodeAt(*timeline, 8), std::nullopt);
  EXPECT_EQ(ErrorOf(*timeline), ShownError());
}

TEST_F(ExportedTimelineTest, SignalsRaiseTheMemory) {
  const std::shared_ptr<Timeline> timeline = Make();
  timeline->Signal(5, absl::OkStatus());
  EXPECT_EQ(Shown(*timeline), 5U);
  timeline->Signal(3, absl::OkStatus());
  EXPECT_EQ(Shown(*timeline), 5U);
  Write(*timeline, 20);
  timeline->Signal(10, absl::OkStatus());
  EXPECT_EQ(Shown(*timeline), 20U) << "a value that a client wrote is lost";
  timeline->Signal(kGone - 1, absl::OkStatus());
  EXPECT_EQ(Shown(*timeline), kGone - 1);
  EXPECT_EQ(CodeAt(*timeline, kGone - 1), StatusCode::kOk);
  EXPECT_EQ(ErrorOf(*timeline), ShownError());
}

TEST_F(ExportedTimelineTest, MemoryIsSeenByWhoeverLooks) {
  const std::shared_ptr<Timeline> timeline = Make();
  const std::shared_ptr<Timeline> other = Make();
  Write(*timeline, 4);
  EXPECT_EQ(CodeAt(*timeline, 4), StatusCode::kOk);
  EXPECT_EQ(CodeAt(*timeline, 5), std::nullopt);
  Write(*timeline, 6);
  EXPECT_EQ(timeline->value(), 6U);
  Write(*timeline, 8);
  EXPECT_FALSE(timeline->WakeWhenReached(8, [] { ADD_FAILURE() << "it waited for what it need not"; }));
  EXPECT_EQ(other->value(), 0U);
}

TEST_F(ExportedTimelineTest, MemoryNeverMakesTheValueFall) {
  const std::shared_ptr<Timeline> timeline = Make(2);
  timeline->Signal(9, absl::OkStatus());
  for (const std::uint64_t less : {std::uint64_t{8}, std::uint64_t{1}, std::uint64_t{0}}) {
    Write(*timeline, less);
    EXPECT_EQ(timeline->value(), 9U);
    EXPECT_EQ(CodeAt(*timeline, 9), StatusCode::kOk);
    EXPECT_FALSE(timeline->WakeWhenReached(9, [] {}));
  }
  Write(*timeline, 12);
  EXPECT_EQ(timeline->value(), 12U);
  Write(*timeline, 3);
  timeline->Signal(10, absl::OkStatus());
  EXPECT_EQ(timeline->value(), 12U);
  timeline->Signal(13, absl::OkStatus());
  EXPECT_EQ(Shown(*timeline), 13U);
}

TEST_F(ExportedTimelineTest, AnErrorIsShownAndThenRaised) {
  const std::shared_ptr<Timeline> timeline = Make(1);
  timeline->Expect(2);
  timeline->Signal(5, absl::DeadlineExceededError("late"));
  EXPECT_EQ(ErrorOf(*timeline), ErrorAt(5, StatusCode::kDeadlineExceeded));
  EXPECT_EQ(Shown(*timeline), 1U) << "what waits for 2 in memory would go on";
  EXPECT_EQ(timeline->value(), 1U);
  EXPECT_EQ(CodeAt(*timeline, 4), std::nullopt);
  EXPECT_EQ(CodeAt(*timeline, 5), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(CodeAt(*timeline, 6), StatusCode::kDeadlineExceeded);
  timeline->Deliver(2, absl::OkStatus());
  EXPECT_EQ(Shown(*timeline), 5U);
  EXPECT_EQ(CodeAt(*timeline, 2), StatusCode::kOk);
  EXPECT_EQ(CodeAt(*timeline, 5), StatusCode::kDeadlineExceeded);
}

TEST_F(ExportedTimelineTest, ARecordedErrorIsShownAndRaisedBySignalOnly) {
  const std::shared_ptr<Timeline> timeline = Make();
  timeline->Record(3, absl::CancelledError("dropped"));
  EXPECT_EQ(ErrorOf(*timeline), ErrorAt(3, StatusCode::kCancelled));
  EXPECT_EQ(Shown(*timeline), 0U);
  EXPECT_EQ(CodeAt(*timeline, 3), StatusCode::kCancelled);
  timeline->Signal(3, absl::CancelledError("dropped"));
  EXPECT_EQ(Shown(*timeline), 3U);
}

TEST_F(ExportedTimelineTest, TheErrorOfTheSmallestPointIsShown) {
  const std::shared_ptr<Timeline> timeline = Make();
  timeline->Signal(6, absl::InternalError("six"));
  EXPECT_EQ(ErrorOf(*timeline), ErrorAt(6, StatusCode::kInternal));
  timeline->Signal(8, absl::UnavailableError("eight"));
  EXPECT_EQ(ErrorOf(*timeline), ErrorAt(6, StatusCode::kInternal));
  EXPECT_EQ(Shown(*timeline), 8U);
  timeline->Signal(4, absl::CancelledError("four"));
  EXPECT_EQ(ErrorOf(*timeline), ErrorAt(4, StatusCode::kCancelled));
  EXPECT_EQ(Shown(*timeline), 8U);
}

TEST_F(ExportedTimelineTest, OnePointExpectedTwiceIsDeliveredTwice) {
  const std::shared_ptr<Timeline> timeline = Make();
  timeline->Expect(2);
  timeline->Expect(2);
  timeline->Signal(7, absl::InternalError("failed"));
  timeline->Deliver(2, absl::OkStatus());
  EXPECT_EQ(Shown(*timeline), 2U);
  timeline->Deliver(2, absl::OkStatus());
  EXPECT_EQ(Shown(*timeline), 7U);
}

TEST_F(ExportedTimelineTest, WhatIsExpectedLaterHoldsNoErrorUp) {
  const std::shared_ptr<Timeline> timeline = Make();
  timeline->Expect(5);
  timeline->Expect(9);
  timeline->Deliver(5, absl::InternalError("failed"));
  EXPECT_EQ(Shown(*timeline), 5U);
  timeline->Expect(6);
  timeline->Deliver(9, absl::OkStatus());
  EXPECT_EQ(Shown(*timeline), 9U);
}

// Three points, each fine or not, in all orders. What memory may show at each step follows from what has been
// delivered.
TEST_F(ExportedTimelineTest, AllOrdersOfThreeDeliveries) {
  for (unsigned failing = 0; failing < 8; ++failing) {
    std::array<std::uint64_t, 3> order = {1, 2, 3};
    do {
      SCOPED_TRACE(::testing::Message() << "failing " << failing << " order " << order[0] << order[1] << order[2]);
      const auto fails = [&](std::uint64_t point) { return (failing >> (point - 1) & 1U) != 0; };
      const std::shared_ptr<Timeline> timeline = Make();
      for (const std::uint64_t point : order) timeline->Expect(point);
      std::set<std::uint64_t> delivered;
      for (const std::uint64_t point : order) {
        timeline->Deliver(point, fails(point) ? absl::InternalError("failed") : absl::OkStatus());
        delivered.insert(point);
        std::uint64_t shown = 0, first_error = 0;
        for (const std::uint64_t each : delivered) {
          const bool all_before = std::distance(delivered.begin(), delivered.find(each)) + 1 == static_cast<int>(each);
          if (!fails(each) || all_before) shown = each;
          if (fails(each) && first_error == 0) first_error = each;
        }
        EXPECT_EQ(Shown(*timeline), shown);
        EXPECT_EQ(ErrorOf(*timeline), first_error == 0 ? ShownError() : ErrorAt(first_error, StatusCode::kInternal));
      }
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

// What a timeline is to be, by its words: slow, and written without the product's order of doing things.
class TimelineModel {
 public:
  explicit TimelineModel(std::uint64_t value) : value_(value), word_(value) {}

  void Expect(std::uint64_t point) { expected_.push_back(point); }
  void Record(std::uint64_t point, StatusCode code) {
    Look();
    Fail(point, code);
  }
  void Signal(std::uint64_t point, StatusCode code) {
    Look();
    if (code == StatusCode::kOk) {
      value_ = std::max(value_, point);
      word_ = std::max(word_, point);
    } else {
      Fail(point, code);
    }
    if (closed_) return;
    // Errors with nothing to come before them.
    for (const std::uint64_t failed : pending_) {
      const bool held =
          std::any_of(expected_.begin(), expected_.end(), [&](std::uint64_t each) { return each < failed; });
      if (!held) word_ = std::max(word_, failed);
    }
    std::erase_if(pending_, [&](std::uint64_t failed) { return failed <= word_; });
  }
  void Deliver(std::uint64_t point, StatusCode code) {
    expected_.erase(std::find(expected_.begin(), expected_.end(), point));
    Signal(point, code);
  }
  void Close() {
    Look();
    if (!closed_) Show(value_ + 1, StatusCode::kAborted);
    if (!closed_) word_ = kGone;
    closed_ = true;
  }
  void RaiseClosed() {
    if (closed_) word_ = kGone;
  }
  void Write(std::uint64_t value) { word_ = value; }

  const std::vector<std::uint64_t>& expected() const { return expected_; }
  bool closed() const { return closed_; }
  std::uint64_t word() const { return word_; }
  ShownError error() const { return shown_; }
  std::uint64_t value() {
    Look();
    return value_;
  }
  std::optional<StatusCode> Reached(std::uint64_t point) {
    Look();
    if (!errors_.empty() && errors_.begin()->first <= point) return errors_.begin()->second;
    if (value_ >= point) return StatusCode::kOk;
    return closed_ ? std::optional<StatusCode>(StatusCode::kAborted) : std::nullopt;
  }

 private:
  void Look() {
    if (!closed_) value_ = std::max(value_, word_);
  }
  void Fail(std::uint64_t point, StatusCode code) {
    errors_.emplace(point, code);  // the first of a point counts
    if (closed_) return;
    Show(point, code);
    pending_.push_back(point);
  }
  void Show(std::uint64_t point, StatusCode code) {
    if (shown_.code == 0 || point < shown_.value) shown_ = ErrorAt(point, code);
  }

  std::uint64_t value_, word_;
  std::vector<std::uint64_t> expected_, pending_;
  std::map<std::uint64_t, StatusCode> errors_;
  ShownError shown_;
  bool closed_ = false;
};

// One life of a timeline: whatever may be asked of it, in any order, checked after each step.
class TimelineLife {
 public:
  TimelineLife(Timeline& timeline, ClientsMapping& client, std::mt19937_64& random)
      : timeline_(timeline), client_(client), random_(random), model_(timeline.value()) {}

  void Run(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i) {
      Step();
      Check();
    }
    while (!model_.expected().empty() && !::testing::Test::HasFailure()) {
      DeliverAny();
      Check();
    }
    if (!::testing::Test::HasFailure() && !model_.closed()) {
      EXPECT_GE(client_.Value(Slot()), model_.error().value) << "an error stays hidden";
    }
    if (::testing::Test::HasFailure()) std::cout << log_ << "\n";
  }

 private:
  static constexpr std::uint64_t kPoints = 24;

  std::uint64_t Below(std::uint64_t bound) { return random_() % bound; }
  std::uint64_t Point() { return 1 + Below(kPoints); }
  std::uint64_t Slot() const { return timeline_.word()->byte_offset(); }
  StatusCode AnyCode() {
    constexpr StatusCode kCodes[] = {StatusCode::kOk, StatusCode::kOk, StatusCode::kInternal, StatusCode::kCancelled};
    return kCodes[Below(4)];
  }
  void Log(const char* what, std::uint64_t value, StatusCode code = StatusCode::kOk) {
    log_ += std::string(what) + " " + std::to_string(value) + " " + absl::StatusCodeToString(code) + "; ";
  }

  void Step() {
    switch (Below(12)) {
      case 0:
      case 1:
      case 2:
        return ExpectAny();
      case 3:
      case 4:
      case 5:
        return DeliverAny();
      case 6:
        return SignalAny();
      case 7:
        return RecordAny();
      case 8:
      case 9:
        return WriteAny();
      case 10:
        Log("raise", 0);
        timeline_.RaiseClosed();
        return model_.RaiseClosed();
      default:
        if (Below(10) != 0) return;
        Log("close", 0);
        timeline_.Close(absl::AbortedError("gone"));
        return model_.Close();
    }
  }

  void ExpectAny() {
    const std::uint64_t point = Point();
    Log("expect", point);
    timeline_.Expect(point);
    model_.Expect(point);
  }
  void DeliverAny() {
    if (model_.expected().empty()) return;
    const std::uint64_t point = model_.expected()[Below(model_.expected().size())];
    const StatusCode code = AnyCode();
    Log("deliver", point, code);
    timeline_.Deliver(point, absl::Status(code, "delivered"));
    model_.Deliver(point, code);
  }
  void SignalAny() {
    const std::uint64_t point = Point();
    const StatusCode code = AnyCode();
    Log("signal", point, code);
    timeline_.Signal(point, absl::Status(code, "signalled"));
    model_.Signal(point, code);
  }
  void RecordAny() {
    // As the executor does: of a point that will be delivered with that error.
    if (model_.expected().empty()) return;
    const std::uint64_t point = model_.expected()[Below(model_.expected().size())];
    Log("record", point);
    timeline_.Record(point, absl::CancelledError("recorded"));
    model_.Record(point, StatusCode::kCancelled);
    timeline_.Deliver(point, absl::CancelledError("recorded"));
    model_.Deliver(point, StatusCode::kCancelled);
  }
  // Only ever raised, until it is closed: then memory has no say.
  void WriteAny() {
    const std::uint64_t value =
        model_.closed() ? Below(kPoints) : std::max(model_.word(), Below(8) == 0 ? Point() : std::uint64_t{0});
    Log("write", value);
    client_.Write(Slot(), value);
    model_.Write(value);
  }

  void Check() {
    // After the end it shows anything less until it is raised again.
    const bool unknown = model_.closed() && model_.word() != kGone;
    ASSERT_EQ(unknown ? model_.word() : client_.Value(Slot()), model_.word());
    ASSERT_EQ(client_.Error(Slot()), model_.error());
    ASSERT_EQ(timeline_.value(), model_.value());
    for (std::uint64_t point = 0; point <= kPoints + 1; ++point) {
      ASSERT_EQ(CodeAt(timeline_, point), model_.Reached(point)) << point;
    }
  }

  Timeline& timeline_;
  ClientsMapping& client_;
  std::mt19937_64& random_;
  TimelineModel model_;
  std::string log_;
};

TEST_F(ExportedTimelineTest, ManyLivesAreAsTheModelHasThem) {
  std::mt19937_64 random(TestSeed());
  for (int life = 0; life < 3'000 && !HasFailure(); ++life) {
    const std::shared_ptr<Timeline> timeline = Make(random() % 4);
    TimelineLife(*timeline, client_, random).Run(40);
  }
}

// A client goes by what stands behind the value that it finds, so the error must be there first.
TEST_F(ExportedTimelineTest, NobodySeesAValueBeforeItsError) {
  for (int round = 0; round < 300 && !HasFailure(); ++round) {
    const std::shared_ptr<Timeline> timeline = Make();
    const std::uint64_t slot = timeline->word()->byte_offset();
    std::atomic<bool> looking{false};
    std::thread reader([&] {
      looking = true;
      while (client_.Value(slot) < 5) {
      }
      EXPECT_EQ(client_.Error(slot), ErrorAt(5, StatusCode::kInternal));
    });
    while (!looking) std::this_thread::yield();
    timeline->Signal(5, absl::InternalError("failed"));
    reader.join();
  }
}

TEST_F(ExportedTimelineTest, ClosingRaisesAllTheWay) {
  const std::shared_ptr<Timeline> timeline = Make(3);
  Write(*timeline, 6);
  int seven = 0, far = 0;
  ASSERT_TRUE(timeline->WakeWhenReached(7, [&seven] { ++seven; }));
  ASSERT_TRUE(timeline->WakeWhenReached(kGone - 1, [&far] { ++far; }));
  timeline->Close(absl::AbortedError("gone"));
  EXPECT_EQ(seven, 1);
  EXPECT_EQ(far, 1);
  EXPECT_EQ(Shown(*timeline), kGone);
  EXPECT_EQ(ErrorOf(*timeline), ErrorAt(7, StatusCode::kAborted));
  EXPECT_EQ(timeline->value(), 6U);
  EXPECT_EQ(CodeAt(*timeline, 6), StatusCode::kOk);
  EXPECT_EQ(CodeAt(*timeline, 7), StatusCode::kAborted);
  EXPECT_EQ(CodeAt(*timeline, kGone), StatusCode::kAborted);
  EXPECT_FALSE(timeline->WakeWhenReached(7, [] {}));
  timeline->Close(absl::CancelledError("again"));
  EXPECT_EQ(CodeAt(*timeline, 7), StatusCode::kAborted);
  EXPECT_EQ(ErrorOf(*timeline), ErrorAt(7, StatusCode::kAborted));
}

TEST_F(ExportedTimelineTest, ClosingKeepsAnEarlierErrorAndPassesALaterOne) {
  const std::shared_ptr<Timeline> failed = Make(3);
  failed->Signal(2, absl::InternalError("failed"));
  failed->Close(absl::AbortedError("gone"));
  EXPECT_EQ(ErrorOf(*failed), ErrorAt(2, StatusCode::kInternal));
  EXPECT_EQ(CodeAt(*failed, 9), StatusCode::kInternal);

  const std::shared_ptr<Timeline> to_come = Make(3);
  to_come->Expect(5);
  to_come->Signal(8, absl::InternalError("failed"));
  to_come->Close(absl::AbortedError("gone"));
  EXPECT_EQ(ErrorOf(*to_come), ErrorAt(4, StatusCode::kAborted));
  EXPECT_EQ(CodeAt(*to_come, 4), StatusCode::kAborted);
  EXPECT_EQ(CodeAt(*to_come, 8), StatusCode::kInternal);
  to_come->Deliver(5, absl::OkStatus());
  EXPECT_EQ(Shown(*to_come), kGone);
  EXPECT_EQ(ErrorOf(*to_come), ErrorAt(4, StatusCode::kAborted));
}

TEST_F(ExportedTimelineTest, AfterTheEndMemorySaysNothingAndIsRaisedAgain) {
  const std::shared_ptr<Timeline> timeline = Make();
  timeline->Signal(3, absl::OkStatus());
  timeline->RaiseClosed();
  EXPECT_EQ(Shown(*timeline), 3U) << "it is not closed";
  timeline->Close(absl::AbortedError("gone"));
  for (const std::uint64_t late : {std::uint64_t{0}, std::uint64_t{4}, std::uint64_t{1'000}}) {
    Write(*timeline, late);
    EXPECT_EQ(timeline->value(), 3U);
    EXPECT_EQ(CodeAt(*timeline, 3), StatusCode::kOk);
    EXPECT_EQ(CodeAt(*timeline, 4), StatusCode::kAborted);
    timeline->RaiseClosed();
    EXPECT_EQ(Shown(*timeline), kGone);
    EXPECT_EQ(ErrorOf(*timeline), ErrorAt(4, StatusCode::kAborted));
  }
}

// As work on a GPU does that signals a point after a later one.
TEST_F(ExportedTimelineTest, ASignalRaisesWhatWasWrittenLess) {
  const std::shared_ptr<Timeline> timeline = Make();
  timeline->Signal(7, absl::OkStatus());
  Write(*timeline, 5);
  timeline->Signal(5, absl::OkStatus());
  EXPECT_EQ(Shown(*timeline), 7U);
}

TEST_F(ExportedTimelineTest, WhatIsBeyondTheGreatestIsNoValue) {
  const std::shared_ptr<Timeline> timeline = Make(2);
  for (const std::uint64_t wrong : {kGone + 1, ~std::uint64_t{0}}) {
    Write(*timeline, wrong);
    EXPECT_EQ(timeline->value(), 2U);
    EXPECT_EQ(CodeAt(*timeline, 3), std::nullopt) << "a GPU waits on";
  }
  timeline->Signal(4, absl::OkStatus());
  EXPECT_EQ(Shown(*timeline), 4U);
  Write(*timeline, ~std::uint64_t{0});
  timeline->Close(absl::AbortedError("gone"));
  EXPECT_EQ(Shown(*timeline), kGone);
  EXPECT_EQ(ErrorOf(*timeline), ErrorAt(5, StatusCode::kAborted));
  Write(*timeline, kGone + 1);
  timeline->RaiseClosed();
  EXPECT_EQ(Shown(*timeline), kGone);
}

TEST_F(ExportedTimelineTest, WhatIsReachedIsShownAgain) {
  const std::shared_ptr<Timeline> timeline = Make(6);
  Write(*timeline, 7);
  EXPECT_EQ(timeline->value(), 7U);
  Write(*timeline, 2);
  timeline->ShowReached(8);
  EXPECT_EQ(Shown(*timeline), 2U);
  timeline->ShowReached(6);
  EXPECT_EQ(Shown(*timeline), 7U);
  timeline->Expect(8);
  timeline->Signal(9, absl::InternalError("failed"));
  timeline->ShowReached(20);
  EXPECT_EQ(Shown(*timeline), 7U) << "who waits for 8 would go on";
  timeline->Deliver(8, absl::OkStatus());
  EXPECT_EQ(Shown(*timeline), 9U);
  timeline->ShowReached(20);
  EXPECT_EQ(Shown(*timeline), 20U);
  timeline->Close(absl::AbortedError("gone"));
  Write(*timeline, 0);
  timeline->ShowReached(1);
  EXPECT_EQ(Shown(*timeline), kGone);
}

TEST_F(ExportedTimelineTest, APlainOneExpectsNothing) {
  Timeline timeline(1);
  timeline.Expect(2);
  timeline.Deliver(4, absl::InternalError("failed"));
  timeline.Deliver(2, absl::OkStatus());
  timeline.RaiseClosed();
  EXPECT_EQ(timeline.word(), nullptr);
  EXPECT_EQ(timeline.value(), 2U);
  EXPECT_EQ(CodeAt(timeline, 4), StatusCode::kInternal);
  EXPECT_FALSE(timeline.Poll());
}

TEST_F(ExportedTimelineTest, WhatAClientWritesWakesWhoeverWaits) {
  const std::shared_ptr<Timeline> timeline = Make();
  std::atomic<int> four{0}, six{0};
  ASSERT_TRUE(timeline->WakeWhenReached(4, [&four] { ++four; }));
  ASSERT_TRUE(timeline->WakeWhenReached(6, [&six] { ++six; }));
  std::this_thread::sleep_for(50ms);
  Write(*timeline, 3);
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(four, 0);
  const auto written = Clock::now();
  Write(*timeline, 5);
  EXPECT_TRUE(Eventually([&] { return four == 1; }));
  EXPECT_LT(Clock::now() - written, kSoon);
  EXPECT_EQ(six, 0);
  Write(*timeline, 6);
  EXPECT_TRUE(Eventually([&] { return six == 1; }));
  // Polled anew after a time in which nobody waited.
  std::this_thread::sleep_for(10ms);
  std::atomic<int> nine{0};
  ASSERT_TRUE(timeline->WakeWhenReached(9, [&nine] { ++nine; }));
  Write(*timeline, 9);
  EXPECT_TRUE(Eventually([&] { return nine == 1; }));
  EXPECT_EQ(four, 1);
}

TEST_F(ExportedTimelineTest, ManyThatWaitAreAllSeen) {
  constexpr std::uint64_t kPages = 8;
  std::vector<std::shared_ptr<SyncPage>> pages;
  std::vector<std::unique_ptr<ClientsMapping>> clients;
  std::vector<std::shared_ptr<Timeline>> timelines;
  std::atomic<int> woken{0};
  for (std::uint64_t page = 0; page < kPages; ++page) {
    pages.push_back(MakePage());
    clients.push_back(std::make_unique<ClientsMapping>(pages.back()->fd()));
    for (std::size_t i = 0; i < SyncPage::kSlots; ++i) {
      timelines.push_back(std::make_shared<Timeline>(*pages.back()->Take(0), poller_));
      ASSERT_TRUE(timelines.back()->WakeWhenReached(1 + i, [&woken] { ++woken; }));
    }
  }
  const auto written = Clock::now();
  for (std::size_t i = 0; i < timelines.size(); ++i) {
    clients[i / SyncPage::kSlots]->Write(timelines[i]->word()->byte_offset(), 64);
  }
  EXPECT_TRUE(Eventually([&] { return woken == static_cast<int>(timelines.size()); }));
  EXPECT_LT(Clock::now() - written, kSoon);
  EXPECT_TRUE(Eventually([&] { return !timelines.front()->Poll(); }));
}

TEST_F(ExportedTimelineTest, WokenOnTheSharedThreadWithoutTheLock) {
  const std::shared_ptr<Timeline> timeline = Make();
  std::atomic<bool> woken{false}, again{false}, shared{false};
  ASSERT_TRUE(timeline->WakeWhenReached(1, [&] {
    shared = on_shared_thread;
    EXPECT_EQ(timeline->value(), 1U);
    EXPECT_TRUE(timeline->WakeWhenReached(2, [&again] { again = true; }));
    woken = true;
  }));
  Write(*timeline, 1);
  EXPECT_TRUE(Eventually([&] { return woken.load(); }));
  EXPECT_TRUE(shared);
  EXPECT_FALSE(on_shared_thread);
  EXPECT_FALSE(again);
  Write(*timeline, 2);
  EXPECT_TRUE(Eventually([&] { return again.load(); }));
}

TEST_F(ExportedTimelineTest, AnErrorWakesAtOnceAndMemoryTheRest) {
  const std::shared_ptr<Timeline> timeline = Make();
  timeline->Expect(2);
  std::atomic<int> two{0}, five{0};
  ASSERT_TRUE(timeline->WakeWhenReached(2, [&two] { ++two; }));
  ASSERT_TRUE(timeline->WakeWhenReached(5, [&five] { ++five; }));
  timeline->Signal(5, absl::InternalError("failed"));
  EXPECT_EQ(five, 1);
  EXPECT_EQ(two, 0);
  Write(*timeline, 2);
  EXPECT_TRUE(Eventually([&] { return two == 1; }));
  EXPECT_EQ(five, 1);
}

TEST_F(ExportedTimelineTest, PolledOnlyWhileSomebodyWaits) {
  const std::shared_ptr<SyncPoller> none;
  const auto timeline = std::make_shared<Timeline>(*page_->Take(0), none);
  EXPECT_FALSE(timeline->Poll());
  const Timeline::Ticket first = timeline->WakeWhenReached(1, [] {});
  const Timeline::Ticket second = timeline->WakeWhenReached(2, [] {});
  ASSERT_TRUE(first && second);
  EXPECT_TRUE(timeline->Poll());
  timeline->Forget(first);
  EXPECT_TRUE(timeline->Poll());
  timeline->Forget(second);
  EXPECT_FALSE(timeline->Poll());
  ASSERT_TRUE(timeline->WakeWhenReached(3, [] {}));
  EXPECT_TRUE(timeline->Poll());
  timeline->Signal(3, absl::OkStatus());
  EXPECT_FALSE(timeline->Poll());
  ASSERT_TRUE(timeline->WakeWhenReached(5, [] {}));
  timeline->Close(absl::AbortedError("gone"));
  EXPECT_FALSE(timeline->Poll());
}

TEST_F(ExportedTimelineTest, WithoutAPollerWhoeverLooksStillSees) {
  const std::shared_ptr<Timeline> timeline = Make();
  int woken = 0;
  ASSERT_TRUE(timeline->WakeWhenReached(4, [&woken] { ++woken; }));
  poller_.reset();  // while it waits
  ASSERT_TRUE(timeline->WakeWhenReached(5, [&woken] { ++woken; }));
  Write(*timeline, 4);
  EXPECT_EQ(timeline->value(), 4U);
  EXPECT_EQ(woken, 0);
  timeline->Signal(5, absl::OkStatus());
  EXPECT_EQ(woken, 2);
  const std::shared_ptr<Timeline> later = Make();
  ASSERT_TRUE(later->WakeWhenReached(1, [&woken] { ++woken; }));
  later->Signal(1, absl::OkStatus());
  EXPECT_EQ(woken, 3);
}

TEST_F(ExportedTimelineTest, AWaitGoesWithItsTimeline) {
  std::shared_ptr<Timeline> timeline = Make();
  const auto held = std::make_shared<int>(0);
  ASSERT_TRUE(timeline->WakeWhenReached(4, [held] { ADD_FAILURE() << "its timeline is gone"; }));
  const std::uint64_t slot = timeline->word()->byte_offset();
  std::this_thread::sleep_for(5ms);
  timeline.reset();
  EXPECT_TRUE(Eventually([&] { return held.use_count() == 1; }));
  client_.Write(slot, 4);
  std::this_thread::sleep_for(20ms);
}

// Daemon, client and whoever waits at once: each point is reached once, by whichever of them raised it.
TEST_F(ExportedTimelineTest, ManyThreadsRaiseAndWait) {
  constexpr std::uint64_t kLast = 400;
  const std::shared_ptr<Timeline> timeline = Make();
  std::vector<std::atomic<int>> woken(kLast + 1);
  for (std::uint64_t point = 1; point <= kLast; ++point) timeline->Expect(point);
  std::atomic<std::uint64_t> next{1};
  const auto deliver = [&] {
    for (std::uint64_t point = next++; point <= kLast; point = next++) timeline->Deliver(point, absl::OkStatus());
  };
  std::thread client([&] {
    for (std::uint64_t value = 1; value <= kLast / 2; ++value) client_.Raise(timeline->word()->byte_offset(), value);
  });
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) threads.emplace_back(deliver);
  threads.emplace_back([&] {
    for (std::uint64_t point = 1; point <= kLast; ++point) {
      if (!timeline->WakeWhenReached(point, [&woken, point] { ++woken[point]; })) ++woken[point];
    }
  });
  for (std::thread& thread : threads) thread.join();
  client.join();
  EXPECT_TRUE(Eventually([&] { return std::count(woken.begin() + 1, woken.end(), 1) == kLast; }));
  EXPECT_EQ(Shown(*timeline), kLast);
}

// Counts how often it is looked at, and says what the test has it say.
class CountedPollable final : public Pollable {
 public:
  struct Counts {
    std::atomic<int> polls{0};
    std::atomic<int> gone{0};
    std::atomic<bool> more{true};
  };
  explicit CountedPollable(Counts& counts) : counts_(counts) {}
  ~CountedPollable() override { ++counts_.gone; }
  bool Poll() override {
    ++counts_.polls;
    return counts_.more;
  }

 private:
  Counts& counts_;
};

TEST(SyncPollerTest, LooksAsLongAsItIsTold) {
  CountedPollable::Counts counts;
  const auto pollable = std::make_shared<CountedPollable>(counts);
  SyncPoller poller;
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(counts.polls, 0);
  poller.Add(pollable);
  EXPECT_TRUE(Eventually([&] { return counts.polls >= 5; }));
  counts.more = false;
  // One more look may be under way, and then there is none.
  EXPECT_TRUE(Eventually([&] {
    const int seen = counts.polls;
    std::this_thread::sleep_for(30ms);
    return counts.polls == seen;
  })) << "it is polled though nobody waits";
  const int last = counts.polls;
  poller.Add(pollable);
  EXPECT_TRUE(Eventually([&] { return counts.polls == last + 1; }));
  std::this_thread::sleep_for(30ms);
  EXPECT_EQ(counts.polls, last + 1);
}

TEST(SyncPollerTest, OneThatIsOverLeavesTheOthersAlone) {
  CountedPollable::Counts counts[3];
  std::vector<std::shared_ptr<CountedPollable>> pollables;
  SyncPoller poller;
  counts[1].more = false;
  for (auto& each : counts) {
    pollables.push_back(std::make_shared<CountedPollable>(each));
    poller.Add(pollables.back());
  }
  EXPECT_TRUE(Eventually([&] { return counts[0].polls >= 5 && counts[2].polls >= 5; }));
  EXPECT_EQ(counts[1].polls, 1);
}

// Tells when the memory is given back: of a shared object, once nobody has so much as a weak pointer to it.
template <typename T>
struct TellingAllocator {
  using value_type = T;
  explicit TellingAllocator(std::atomic<int>& the_freed) : freed(the_freed) {}
  template <typename U>
  explicit TellingAllocator(const TellingAllocator<U>& other) : freed(other.freed) {}
  T* allocate(std::size_t count) { return std::allocator<T>().allocate(count); }
  void deallocate(T* memory, std::size_t count) {
    std::allocator<T>().deallocate(memory, count);
    ++freed;
  }
  template <typename U>
  bool operator==(const TellingAllocator<U>& other) const {
    return &freed == &other.freed;
  }

  std::atomic<int>& freed;
};

TEST(SyncPollerTest, KeepsNothingOfWhatIsGone) {
  CountedPollable::Counts counts;
  std::atomic<int> freed{0};
  auto pollable = std::allocate_shared<CountedPollable>(TellingAllocator<CountedPollable>(freed), counts);
  SyncPoller poller;
  poller.Add(pollable);
  EXPECT_TRUE(Eventually([&] { return counts.polls >= 3; }));
  EXPECT_EQ(counts.gone, 0);
  pollable.reset();
  EXPECT_TRUE(Eventually([&] { return counts.gone == 1 && freed == 1; }));
  const int last = counts.polls;
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(counts.polls, last);
}

// An idle wait costs next to nothing, and a fresh one is seen at once.
TEST(SyncPollerTest, LooksLessOftenWhereNothingHappens) {
  CountedPollable::Counts counts;
  const auto pollable = std::make_shared<CountedPollable>(counts);
  SyncPoller poller;
  poller.Add(pollable);
  std::this_thread::sleep_for(100ms);
  const int before = counts.polls;
  std::this_thread::sleep_for(600ms);
  EXPECT_GT(counts.polls - before, 30) << "it sleeps for too long";
  EXPECT_LE(counts.polls - before, 1'200) << "it looks more often than every half millisecond";
  CountedPollable::Counts fresh;
  const auto other = std::make_shared<CountedPollable>(fresh);
  poller.Add(other);
  EXPECT_TRUE(Eventually([&] { return fresh.polls > 0; }));
}

TEST(SyncPollerTest, EndsWhileItWatches) {
  for (int round = 0; round < 20; ++round) {
    CountedPollable::Counts counts;
    const auto pollable = std::make_shared<CountedPollable>(counts);
    auto poller = std::make_unique<SyncPoller>();
    if (round % 3 != 0) poller->Add(pollable);
    EXPECT_TRUE(Eventually([&] { return round % 3 != 2 || counts.polls >= 1; }));
    const auto since = Clock::now();
    poller.reset();
    EXPECT_LT(Clock::now() - since, kSoon);
    const int last = counts.polls;
    std::this_thread::sleep_for(2ms);
    EXPECT_EQ(counts.polls, last);
    EXPECT_EQ(pollable.use_count(), 1);
  }
}

TEST(SyncPollerTest, AddedFromManyThreads) {
  SyncPoller poller;
  std::vector<std::unique_ptr<CountedPollable::Counts>> counts;
  std::vector<std::shared_ptr<CountedPollable>> pollables;
  for (int i = 0; i < 200; ++i) {
    counts.push_back(std::make_unique<CountedPollable::Counts>());
    counts.back()->more = i % 2 == 0;
    pollables.push_back(std::make_shared<CountedPollable>(*counts.back()));
  }
  std::vector<std::thread> threads;
  for (std::size_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::size_t i = thread; i < pollables.size(); i += 4) poller.Add(pollables[i]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(Eventually(
      [&] { return std::all_of(counts.begin(), counts.end(), [](const auto& each) { return each->polls >= 1; }); }));
  for (std::size_t i = 1; i < counts.size(); i += 2) EXPECT_EQ(counts[i]->polls, 1);
}

}  // namespace
}  // namespace tessera::server
