// The C ABI on a job of one rank.
#include <chrono>
#include <cstring>
#include <thread>

#include "engine/api.h"
#include "engine/engine.h"
#include "harness.h"

namespace hvd_ext::test {
namespace {

constexpr HvdExtConfig kConfig = {60, 0, 8, 1, 0, ""};

int Code_(Code code) { return static_cast<int>(code); }

void Fails(int code, Code expected, const std::string& words) {
  CHECK_EQ(code, Code_(expected));
  CHECK(std::string(hvd_ext_error()).find(words) != std::string::npos);
}

int Open(int64_t engine, int64_t plan, int64_t* channel) {
  const char* names[] = {"a", "b", "c"};
  const int64_t elements[] = {2, 3, 4}, first[] = {2}, second[] = {1, 0};
  const HvdExtBucket buckets[] = {{0, 2, 0, plan, 0, 1, first, nullptr}, {1, -1, 1, plan, 8, 2, second, nullptr}};
  const HvdExtChannel spec{"Adam", 3, names, elements, 2, buckets, nullptr, 0};
  return hvd_ext_channel_open(engine, &spec, channel);
}

// A job of one rank, with a plan and a channel, or a process set of it.
struct Started {
  int64_t job = 0, engine = 0, plan = 0, channel = 0;

  explicit Started(bool in_a_set = false) {
    CHECK_EQ(hvd_ext_start_local(&kConfig, &job), 0);
    engine = job;
    int32_t rank = -1;
    const int32_t ranks[] = {0};
    if (in_a_set) CHECK_EQ(hvd_ext_start_set(job, ranks, 1, 1, &kConfig, &engine, &rank), 0);
    CHECK_EQ(hvd_ext_plan_add(engine, nullptr, 0, 1, &plan), 0);
    CHECK_EQ(Open(engine, plan, &channel), 0);
  }
  void Stop() const {
    int32_t alone = 7;
    CHECK_EQ(hvd_ext_stop(job, 0, &alone), 0);
    CHECK_EQ(alone, 0);
  }
};

TEST("api: every function says so when no engine runs") {
  int64_t number = 0, values[5];
  int32_t alone = 7;
  const char* words = "no engine runs; call init() first";
  Fails(hvd_ext_start_set(1, nullptr, 0, 1, &kConfig, &number, &alone), Code::kStopped, words);
  Fails(hvd_ext_plan_add(1, nullptr, 0, 1, &number), Code::kStopped, words);
  Fails(hvd_ext_plan_remove(1), Code::kStopped, words);
  Fails(Open(1, 1, &number), Code::kStopped, words);
  Fails(hvd_ext_channel_close(1), Code::kStopped, words);
  Fails(hvd_ext_channel_begin_step(1), Code::kStopped, words);
  Fails(hvd_ext_channel_submit(1, 0, nullptr, 0, &number), Code::kStopped, words);
  Fails(hvd_ext_channel_collect(1, 1, 0, nullptr, nullptr), Code::kStopped, words);
  int32_t flag = 0;
  Fails(hvd_ext_channel_skip_step(1, &number), Code::kStopped, words);
  Fails(hvd_ext_channel_give_result(1, 0, nullptr, 0), Code::kStopped, words);
  Fails(hvd_ext_channel_flush(1, 1), Code::kStopped, words);
  Fails(hvd_ext_channel_leave(1), Code::kStopped, words);
  Fails(hvd_ext_channel_next_round(1, &flag), Code::kStopped, words);
  Fails(hvd_ext_channel_progress(1, &number, &number), Code::kStopped, words);
  Fails(hvd_ext_channel_set_quorum(1, 1), Code::kStopped, words);
  Fails(hvd_ext_channel_set_flags(1, 1), Code::kStopped, words);
  Fails(hvd_ext_channel_rounds(1, 1, 0, 1, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, &number),
        Code::kStopped, words);
  Fails(hvd_ext_channel_held_read(1, 0, nullptr, &flag), Code::kStopped, words);
  Fails(hvd_ext_channel_held_write(1, 0, nullptr), Code::kStopped, words);
  Fails(hvd_ext_exchange(1, "x", "", 0, 0, nullptr, nullptr, nullptr), Code::kStopped, words);
  Fails(hvd_ext_statistics(1, values), Code::kStopped, words);
  CHECK_EQ(hvd_ext_stop(number, 0, &alone), 0);
  CHECK_EQ(alone, 0);
  hvd_ext_abort(3);  // has no effect
}

TEST("api: a job of one rank starts, works and stops, twice in one process") {
  int64_t last_generation = -1;
  for (int round = 0; round < 2; ++round) {
    const Started started;
    int64_t other = 0, values[5];
    Fails(hvd_ext_start_local(&kConfig, &other), Code::kInvalid, "an engine runs already in this process");
    CHECK(started.job > last_generation);
    last_generation = started.job;
    CHECK_EQ(started.plan >> 32, started.job);
    Fails(hvd_ext_plan_remove(started.plan), Code::kInvalid, "is used by channel 'Adam'");
    void* result = nullptr;
    const char* data = nullptr;
    const int64_t* offsets = nullptr;
    CHECK_EQ(hvd_ext_exchange(started.job, "hosts", "me\0too", 6, 0, &result, &data, &offsets), 0);
    CHECK_EQ(offsets[0], 0);
    CHECK_EQ(offsets[1], 6);
    CHECK_EQ(std::memcmp(data, "me\0too", 6), 0);
    hvd_ext_exchange_free(result);
    Fails(hvd_ext_exchange(started.job, "", "", 0, 0, &result, &data, &offsets), Code::kInvalid, "must have a name");
    CHECK_EQ(hvd_ext_channel_close(started.channel), 0);
    Fails(hvd_ext_channel_begin_step(started.channel), Code::kStopped, "has been closed");
    CHECK_EQ(hvd_ext_plan_remove(started.plan), 0);
    CHECK_EQ(hvd_ext_statistics(started.job, values), 0);
    CHECK_EQ(values[1], 1);
    started.Stop();
    std::shared_ptr<Engine> engine;
    CHECK_FAILS(Engine::Find(0, &engine), Code::kStopped, "hvd_ext is not running");
  }
}

TEST("api: a step in parts hands over its tensors one by one, in any order, and collects all results") {
  const Started started;
  const int64_t channel = started.channel;
  int64_t ticket = 0, nbytes[] = {16, 24, 16};
  double two[] = {1.5, 2.5}, three[] = {4, 5, 6}, twos[2], threes[3];
  float four[] = {7, 8, 9, 10}, fours[4];
  void* outputs[] = {twos, threes, fours};
  Fails(hvd_ext_channel_submit(channel, 0, two, 16, &ticket), Code::kInvalid, "before the first step");
  for (int step = 1; step <= 2; ++step) {
    two[0] = step;
    CHECK_EQ(hvd_ext_channel_begin_step(channel), 0);
    CHECK_EQ(hvd_ext_channel_submit(channel, 1, three, 24, &ticket), 0);
    CHECK_EQ(hvd_ext_channel_submit(channel, 2, four, 16, &ticket), 0);
    Fails(hvd_ext_channel_submit(channel, 2, four, 16, &ticket), Code::kInvalid, "was submitted twice");
    Fails(hvd_ext_channel_submit(channel, 0, two, 8, &ticket), Code::kInvalid, "must have 16 bytes");
    // A waiting caller does not keep another thread from handing over the last tensor.
    std::thread late([&] { CHECK_EQ(hvd_ext_channel_submit(channel, 0, two, 16, &ticket), 0); });
    CHECK_EQ(hvd_ext_channel_collect(channel, step, 3, outputs, nbytes), 0);
    late.join();
    CHECK_EQ(ticket, step);
    CHECK_EQ(twos[0], step);
    CHECK_EQ(threes[2], 6.0);
    CHECK_EQ(fours[3], 10.0f);
  }
  Fails(hvd_ext_channel_collect(channel, 7, 3, outputs, nbytes), Code::kInvalid, "step 7 is not under way");
  CHECK_EQ(hvd_ext_channel_collect(channel, 7, 0, nullptr, nullptr), 0);
  started.Stop();
}

TEST("api: a stop ends a step that a caller waits for, however far the caller is, in process sets too") {
  for (bool in_a_set : {false, true}) {
    for (int milliseconds : {0, 1, 20}) {
      const Started started(in_a_set);
      std::thread caller([&] {
        double two[] = {1.5, 2.5};
        const void* inputs[] = {two};
        void* outputs[] = {two};
        int64_t nbytes[] = {16};
        // The other tensor of its bucket never comes.
        CHECK_EQ(hvd_ext_channel_reduce(started.channel, 1, inputs, outputs, nbytes), Code_(Code::kStopped));
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
      started.Stop();
      caller.join();
    }
  }
}

TEST("api: versions, kernels and the decoder") {
  CHECK_EQ(hvd_ext_abi_version(), HVD_EXT_ABI_VERSION);
  CHECK(hvd_ext_plan_version() >= 1);
  float a[] = {1, 2}, b[] = {10, 20};
  CHECK_EQ(hvd_ext_test_add(0, a, b, 2), 0);
  CHECK_EQ(hvd_ext_test_divide(0, a, 2, 2), 0);
  CHECK_EQ(a[1], 11.0f);
  Fails(hvd_ext_test_add(6, a, b, 2), Code::kInvalid, "dtype (6) cannot be summed");
  Fails(hvd_ext_test_divide(17, a, 2, 2), Code::kInvalid, "dtype (17) cannot be divided");
  Fails(hvd_ext_test_divide(0, a, 0, 2), Code::kInvalid, "divisor (0) must not be zero");
  int64_t row[] = {0, 1, 1, 0, 1};
  CHECK_EQ(hvd_ext_test_decode(row, 1, 1, 0, 2), 0);
  CHECK_EQ(hvd_ext_test_decode(row, 1, 1, 1, 2), Code_(Code::kInvalid));
  int64_t engine = 0;
  int32_t alone = 0;
  HvdExtConfig config = {60, 0, 8, 1, 0, nullptr};
  CHECK_EQ(hvd_ext_start_local(&config, &engine), 0);
  CHECK_EQ(hvd_ext_stop(engine, 0, &alone), 0);
  config = {-1, 0, 8, 1, 0, ""};
  Fails(hvd_ext_start_local(&config, &engine), Code::kInvalid, "must not be negative");
}

}  // namespace
}  // namespace hvd_ext::test
