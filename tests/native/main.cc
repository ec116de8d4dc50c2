// Runs the tests whose name contains the argument, or all. Exit status 1 if one failed. Under mpirun every rank runs
// every test, and a rank that fails ends the job.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>
#include <string>

#include "engine/transport.h"
#include "harness.h"

namespace hvd_ext::test {

bool IsSanitized() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return true;
#else
  return false;
#endif
}

void Fail(const char* file, int line, const std::string& text) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + text);
}

void FailStatus(const char* file, int line, const char* expression, const Status& status, const std::string& must) {
  std::string text = std::string(expression) + ": status " + std::to_string(static_cast<int>(status.code)) + " '" +
                     status.message + "'";
  Fail(file, line, must.empty() ? text : text + ", must have " + must);
}

int RunAll(const char* filter, bool quiet) {
  using Clock = std::chrono::steady_clock;
  int run = 0, failed = 0;
  for (const Test& test : Tests()) {
    if (std::strstr(test.name, filter) == nullptr) continue;
    ++run;
    const char* outcome = "ok";
    const Clock::time_point begin = Clock::now();
    const std::clock_t processor_begin = std::clock();
    try {
      test.run();
    } catch (const std::exception& error) {
      ++failed;
      outcome = "FAILED";
      std::fprintf(stderr, "'%s' failed\n    %s\n", test.name, error.what());
      FinishMpi(true, 1);  // under MPI the other ranks would wait
    }
    const std::chrono::duration<double> seconds = Clock::now() - begin;
    const double processor = static_cast<double>(std::clock() - processor_begin) / CLOCKS_PER_SEC;
    if (!quiet) std::printf("%-6s %6.2f s, processor %6.2f s  %s\n", outcome, seconds.count(), processor, test.name);
    std::fflush(stdout);
  }
  if (!quiet) std::printf("%d tests, %d failed\n", run, failed);
  if (run == 0) std::fprintf(stderr, "no test has a name that contains '%s'\n", filter);
  return failed > 0 || run == 0;
}

}  // namespace hvd_ext::test

int main(int argc, char** argv) {
  bool quiet = argc > 1 && std::strcmp(argv[1], "--quiet") == 0;
  const char* filter = argc > 1 + quiet ? argv[1 + quiet] : "";
  int failed = hvd_ext::test::RunAll(filter, quiet);
  hvd_ext::FinishMpi(false, 0);
  return failed;
}
