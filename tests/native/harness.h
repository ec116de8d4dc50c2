// A test harness of one page. A test is a sentence:
//
//   TEST("a send ends only when its receive has come") { ...; CHECK_EQ(received, sent); }
//
// A check that fails throws, so that the rest of its test does not run; the other tests do.
#pragma once

#include <cstdio>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/status.h"

namespace hvd_ext::test {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Test {
  const char* name;
  const char* file;
  void (*run)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

// Whether what is tested is compiled under a sanitizer. Under that of addresses the tests themselves are not.
bool IsSanitized();

struct Registration {
  Registration(const char* name, const char* file, void (*run)()) { Tests().push_back({name, file, run}); }
};

// Checks stand in the tests by the hundred: what they share is compiled once, and for each pair of types.
[[noreturn]] void Fail(const char* file, int line, const std::string& text);
[[noreturn]] void FailStatus(const char* file, int line, const char* expression, const Status& status,
                             const std::string& must = "");

template <typename Seen, typename Expected>
[[noreturn]] void FailEqual(const char* file, int line, const char* what, const Seen& seen, const Expected& expected) {
  std::ostringstream text;
  text << what << " is " << seen << ", must be " << expected;
  Fail(file, line, text.str());
}

#define HVD_EXT_TEST_JOIN(a, b) a##b
#define HVD_EXT_TEST_NAMED(name, number)                                              \
  static void HVD_EXT_TEST_JOIN(RunTest, number)();                                   \
  static const ::hvd_ext::test::Registration HVD_EXT_TEST_JOIN(registration, number)( \
      name, __FILE__, HVD_EXT_TEST_JOIN(RunTest, number));                            \
  static void HVD_EXT_TEST_JOIN(RunTest, number)()
#define HVD_EXT_TEST_AT(name, line) HVD_EXT_TEST_NAMED(name, line)
#define TEST(name) HVD_EXT_TEST_AT(name, __LINE__)

#define CHECK(condition)                                                                   \
  do {                                                                                     \
    if (!(condition)) ::hvd_ext::test::Fail(__FILE__, __LINE__, "must hold: " #condition); \
  } while (false)

#define CHECK_EQ(seen, expected)                                                                        \
  do {                                                                                                  \
    const auto& seen_ = (seen);                                                                         \
    const auto& expected_ = (expected);                                                                 \
    if (!(seen_ == expected_)) ::hvd_ext::test::FailEqual(__FILE__, __LINE__, #seen, seen_, expected_); \
  } while (false)

#define CHECK_OK(expression)                                                                  \
  do {                                                                                        \
    const ::hvd_ext::Status status_ = (expression);                                           \
    if (!status_.ok()) ::hvd_ext::test::FailStatus(__FILE__, __LINE__, #expression, status_); \
  } while (false)

// Checks that the status has this code and that its message contains `part`.
#define CHECK_FAILS(expression, expected_code, part)                                            \
  do {                                                                                          \
    const ::hvd_ext::Status status_ = (expression);                                             \
    if (status_.code != (expected_code) || status_.message.find(part) == std::string::npos) {   \
      ::hvd_ext::test::FailStatus(__FILE__, __LINE__, #expression, status_,                     \
                                  std::string("code " #expected_code " and '") + (part) + "'"); \
    }                                                                                           \
  } while (false)

}  // namespace hvd_ext::test
