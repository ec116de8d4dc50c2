// Processes that fill and read one cache are killed at random instants.
//
//   hvd_ext_cache_kills KILLS SECONDS [SEED]
//
// Three processes at a time load samples of 0 to 40 kB into a folder and into memory that stays, which has room for
// half of them, and compare every byte that they look up. One of them is killed at random instants, which are spread
// over what is left of SECONDS, all checks included, and another takes its place. After every ten kills they are asked
// to end; the samples that had been finished (Insert said that they were stored) are then looked up in a new store, and
// the next round begins with nothing.
//
// Exit status 1 where a byte was wrong, a process hung, or less than 99 % of the finished samples were found. It prints
// what it has counted.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cache/store.h"

namespace hvd_ext {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kSamples = 6000;
constexpr int64_t kBatch = 16;
constexpr int kProcesses = 3;
constexpr int kKillsOfRound = 10;
constexpr double kHangS = 15;

int64_t SizeOf(int64_t number) { return number % 17 == 0 ? number % 3 : number * 7919 % 20000 + number % 2 * 20000; }

// All samples are cut out of one piece of noise, so that comparing costs little.
struct Noise {
  std::vector<char> bytes;
  Noise() : bytes(1 << 20) {
    std::mt19937_64 random(1);
    for (size_t i = 0; i < bytes.size(); i += 8) {
      uint64_t word = random();
      std::memcpy(bytes.data() + i, &word, 8);
    }
  }
  const char* Of(int64_t number) const { return bytes.data() + number * 104729 % 1000000; }
};

// What all processes count together.
struct Shared {
  std::atomic<bool> stop{false};
  std::atomic<int64_t> hits{0}, wrong{0}, failed{0};
  std::atomic<uint8_t> finished[kSamples];
};

StoreOptions OptionsIn(const std::string& folder) {
  StoreOptions options;
  options.name = "kills";
  options.fingerprint = {7, 9};
  options.samples = kSamples;
  options.memory_bytes = 60 << 20;
  options.keep = folder + "/kept";
  options.disk = folder + "/disk";
  return options;
}

void Work(const Noise& noise, const std::string& folder, Shared* shared, unsigned seed) {
  std::shared_ptr<Store> store;
  Status status = Store::Open(OptionsIn(folder), &store);
  if (!status.ok()) {
    std::fprintf(stderr, "opening failed: %s\n", status.message.c_str());
    ++shared->failed;
    return;
  }
  std::mt19937 random(seed);
  std::vector<int64_t> order(kSamples);
  std::iota(order.begin(), order.end(), 0);
  while (!shared->stop) {
    std::shuffle(order.begin(), order.end(), random);
    for (int64_t at = 0; at < kSamples && !shared->stop; at += kBatch) {
      std::vector<int64_t> numbers(order.begin() + at, order.begin() + std::min(at + kBatch, kSamples));
      for (bool wait : {false, true}) {
        std::vector<int64_t> missing, pending, left;
        auto take = [&](int64_t place, const char* data, int64_t nbytes) {
          int64_t number = numbers[static_cast<size_t>(place)];
          bool right =
              nbytes == SizeOf(number) && std::memcmp(data, noise.Of(number), static_cast<size_t>(nbytes)) == 0;
          ++(right ? shared->hits : shared->wrong);
        };
        status = store->Lookup(numbers.data(), static_cast<int64_t>(numbers.size()), wait, take, &missing, &pending);
        if (!status.ok()) ++shared->failed;
        for (int64_t place : missing) {
          int64_t number = numbers[static_cast<size_t>(place)];
          std::this_thread::sleep_for(std::chrono::microseconds(300));
          Piece piece{noise.Of(number), SizeOf(number)};
          bool stored = false;
          status = store->Insert(number, &piece, 1, &stored);
          if (!status.ok()) ++shared->failed;
          if (stored) shared->finished[number] = 1;
        }
        for (int64_t place : pending) left.push_back(numbers[static_cast<size_t>(place)]);
        numbers = left;
      }
    }
  }
  for (std::string words; store->NextWarning(&words);) {
    if (words.find("its limit of") == std::string::npos) std::fprintf(stderr, "warning: %s\n", words.c_str());
  }
}

struct Totals {
  int64_t kills = 0, rounds = 0, hits = 0, finished = 0, found = 0, hung = 0, wrong = 0, failed = 0;
};

// `left_s` gives the seconds until all kills of all rounds shall be done, of which `kills_left` were left before this
// one.
void Round(const Noise& noise, const std::string& folder, int kills, int kills_left,
           const std::function<double()>& left_s, std::mt19937* random, Totals* totals) {
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  Shared* shared = new (memory) Shared;
  std::vector<pid_t> processes;
  auto begin_one = [&] {
    unsigned seed = static_cast<unsigned>((*random)());
    pid_t child = fork();
    if (child == 0) {
      Work(noise, folder, shared, seed);
      _exit(0);
    }
    processes.push_back(child);
  };
  for (int i = 0; i < kProcesses; ++i) begin_one();
  for (int i = 0; i < kills; ++i) {
    const double most_s = std::max(0.001, 2 * left_s() / (kills_left - i));
    std::this_thread::sleep_for(
        std::chrono::duration<double>(std::uniform_real_distribution<double>(0, most_s)(*random)));
    size_t which = (*random)() % processes.size();
    kill(processes[which], SIGKILL);
    if (i % 2 == 0) waitpid(processes[which], nullptr, 0);  // the others see a zombie in half of the cases
    pid_t killed = processes[which];
    processes.erase(processes.begin() + static_cast<int64_t>(which));
    begin_one();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (i % 2 != 0) waitpid(killed, nullptr, 0);
    ++totals->kills;
  }
  shared->stop = true;
  Clock::time_point begin = Clock::now();
  for (pid_t process : processes) {
    while (waitpid(process, nullptr, WNOHANG) == 0) {
      if (Clock::now() - begin > std::chrono::duration<double>(kHangS)) {
        ++totals->hung;
        kill(process, SIGKILL);
        waitpid(process, nullptr, 0);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  std::shared_ptr<Store> store;
  Status status = Store::Open(OptionsIn(folder), &store);
  if (!status.ok()) std::abort();
  std::vector<int64_t> missing, pending;
  int64_t finished = 0, found = 0;
  for (int64_t number = 0; number < kSamples; ++number) {
    auto take = [&](int64_t, const char* data, int64_t nbytes) {
      bool right = nbytes == SizeOf(number) && std::memcmp(data, noise.Of(number), static_cast<size_t>(nbytes)) == 0;
      if (!right) ++shared->wrong;
      found += right && shared->finished[number] ? 1 : 0;
    };
    if (!store->Lookup(&number, 1, /*wait=*/true, take, &missing, &pending).ok()) ++shared->failed;
    finished += shared->finished[number];
  }
  ++totals->rounds;
  totals->finished += finished;
  totals->found += found;
  totals->hits += shared->hits;
  totals->wrong += shared->wrong;
  totals->failed += shared->failed;
  munmap(memory, sizeof(Shared));
}

}  // namespace
}  // namespace hvd_ext

int main(int argc, char** argv) {
  using namespace hvd_ext;
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s KILLS SECONDS [SEED]\n", argv[0]);
    return 2;
  }
  int kills = std::atoi(argv[1]);
  const double seconds = std::atof(argv[2]);
  std::mt19937 random(argc > 3 ? static_cast<unsigned>(std::atoi(argv[3])) : 1);
  std::string pattern = (std::filesystem::temp_directory_path() / "hvd_ext-kills-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) return 2;
  Noise noise;
  Totals totals;
  Clock::time_point begin = Clock::now();
  auto left_s = [&] { return seconds - std::chrono::duration<double>(Clock::now() - begin).count(); };
  while (totals.kills < kills) {
    std::string folder = pattern + "/" + std::to_string(totals.rounds);
    std::filesystem::create_directory(folder);
    const int kills_left = kills - static_cast<int>(totals.kills);
    Round(noise, folder, std::min(kKillsOfRound, kills_left), kills_left, left_s, &random, &totals);
    std::filesystem::remove_all(folder);
  }
  std::filesystem::remove_all(pattern);
  double share = totals.finished == 0 ? 0 : static_cast<double>(totals.found) / static_cast<double>(totals.finished);
  std::printf(
      "%lld kills in %.1f s, %lld rounds: %lld samples read, %lld wrong, %lld hung, %lld calls failed, %lld of %lld "
      "finished samples used again (%.3f %%)\n",
      static_cast<long long>(totals.kills), std::chrono::duration<double>(Clock::now() - begin).count(),
      static_cast<long long>(totals.rounds), static_cast<long long>(totals.hits), static_cast<long long>(totals.wrong),
      static_cast<long long>(totals.hung), static_cast<long long>(totals.failed), static_cast<long long>(totals.found),
      static_cast<long long>(totals.finished), 100 * share);
  return totals.wrong == 0 && totals.hung == 0 && totals.failed == 0 && share >= 0.99 ? 0 : 1;
}
