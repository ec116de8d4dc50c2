// The result of a call. A status is a value; the Python side maps its code to an exception in one place
// (hvd_ext/errors.py).
#pragma once

#include <string>
#include <type_traits>
#include <utility>

namespace hvd_ext {

enum class Code : int {
  kOk = 0,
  kInvalid = 1,        // an argument of the caller is wrong
  kMismatch = 2,       // ranks disagree; all of them raise it, and the next collective works
  kCommunication = 3,  // a peer has left or does not answer; call shutdown() and init() again
  kInternal = 4,       // a broken invariant: a bug
  kStopped = 5,        // the engine is not running, or is not the one that the handle came from
};

struct Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
  static Status Ok() { return {}; }
  // The failure with the name of its subject in front; ok stays ok.
  Status Named(const std::string& subject) const { return ok() ? *this : Status{code, subject + ": " + message}; }
};

inline Status Invalid(std::string m) { return {Code::kInvalid, std::move(m)}; }
inline Status Mismatch(std::string m) { return {Code::kMismatch, std::move(m)}; }
inline Status Communication(std::string m) { return {Code::kCommunication, std::move(m)}; }
inline Status Internal(std::string m) { return {Code::kInternal, std::move(m)}; }
inline Status Stopped(std::string m) { return {Code::kStopped, std::move(m)}; }

// Refuses a value that breaks a rule, as "subject (value) rule". Not where each step passes: it makes its words.
template <typename T>
Status Require(bool holds, const std::string& subject, T value, const std::string& rule) {
  if (holds) return Status::Ok();
  if constexpr (std::is_enum_v<T>) {
    return Require(false, subject, static_cast<std::underlying_type_t<T>>(value), rule);
  } else {
    return Invalid(subject + " (" + std::to_string(value) + ") " + rule);
  }
}

// A user's name in a message.
inline std::string Quoted(const std::string& name) { return "'" + name + "'"; }

#define HVD_EXT_RETURN_IF_ERROR(expression)   \
  do {                                        \
    ::hvd_ext::Status status_ = (expression); \
    if (!status_.ok()) return status_;        \
  } while (false)

}  // namespace hvd_ext
