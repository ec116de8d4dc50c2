// How the engine's status leaves a TensorFlow op. hvd_ext/errors.py (TENSORFLOW_CODES) reads the codes back; each code
// of the engine has one code of TensorFlow of its own.
#pragma once

#include "absl/status/status.h"
#include "base/status.h"

namespace hvd_ext {

inline absl::Status ToTensorFlow(const Status& status) {
  switch (status.code) {
    case Code::kOk:
      return absl::OkStatus();
    case Code::kInvalid:
      return absl::InvalidArgumentError(status.message);
    case Code::kMismatch:
      return absl::FailedPreconditionError(status.message);
    case Code::kCommunication:
      return absl::UnknownError(status.message);
    case Code::kStopped:
      return absl::AbortedError(status.message);
    case Code::kInternal:
      break;
  }
  return absl::InternalError(status.message);
}

}  // namespace hvd_ext
