// HvdExt>ReadRange: a range of a file of this machine, as a string: a file of a folder, or a member of an archive.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "ops/data/capi.h"

namespace hvd_ext {
namespace {

// Closes itself.
class File {
 public:
  explicit File(const std::string& path) : descriptor_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  int descriptor() const { return descriptor_; }

 private:
  const int descriptor_;
};

// OUT_OF_RANGE is not among them: tf.data takes it for the end of the data.
TF_Code CodeOfErrno(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return TF_NOT_FOUND;
    case EACCES:
    case EPERM:
      return TF_PERMISSION_DENIED;
    case EISDIR:
    case ENAMETOOLONG:
      return TF_INVALID_ARGUMENT;
    case EMFILE:
    case ENFILE:
    case ENOMEM:
      return TF_RESOURCE_EXHAUSTED;
    default:
      return TF_UNAVAILABLE;
  }
}

void FailAt(Run& run, const std::string& path, const char* what) {
  int error = errno;
  run.Fail(CodeOfErrno(error), "file (" + path + "): " + what + ": " + std::strerror(error));
}

void RunReadRange(void*, TF_OpKernelContext* context) {
  Run run(context);
  const TF_TString* named = run.StringScalar(0, "path");
  int64_t offset = run.Scalar(1, "offset"), nbytes = run.Scalar(2, "nbytes");
  TF_Tensor* output = run.Output(0, TF_STRING, {});
  if (!run.ok()) return;
  if (offset < 0) return run.Fail(TF_INVALID_ARGUMENT, "offset (" + std::to_string(offset) + "): must not be negative");
  const std::string path(TF_TString_GetDataPointer(named), TF_TString_GetSize(named));
  if (path.find('\0') != std::string::npos) return run.Fail(TF_INVALID_ARGUMENT, "path: has a byte 0 in it");
  const File file(path);
  struct stat about;
  if (file.descriptor() < 0) return FailAt(run, path, "does not open");
  if (fstat(file.descriptor(), &about) != 0) return FailAt(run, path, "does not say its size");
  if (S_ISDIR(about.st_mode)) return run.Fail(TF_INVALID_ARGUMENT, "file (" + path + "): is a folder");
  const int64_t size = about.st_size;
  const int64_t wanted = nbytes < 0 ? size - offset : nbytes;
  // Before memory is taken: the numbers may be wrong. A pipe has no range.
  if (offset > size || wanted > size - offset) {
    return run.Fail(TF_DATA_LOSS, "file (" + path + "): has " + std::to_string(size) + " bytes, and " +
                                      (nbytes < 0 ? "all" : std::to_string(nbytes)) + " from byte " +
                                      std::to_string(offset) + " on are asked for; it is shorter than it was");
  }
  char* to = TF_TString_ResizeUninitialized(DataOf<TF_TString>(output), static_cast<size_t>(wanted));
  for (int64_t done = 0; done < wanted;) {
    ssize_t got = pread(file.descriptor(), to + done, static_cast<size_t>(wanted - done), offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FailAt(run, path, "does not read");
    if (got == 0) {
      return run.Fail(TF_DATA_LOSS, "file (" + path + "): ended at byte " + std::to_string(offset + done) +
                                        " while it was read; it had " + std::to_string(size) + " bytes");
    }
    done += got;
  }
}

void ReadRangeShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  ShapePointer path = FirstInput(context, 0, status);
  if (path != nullptr) SetOutput(context, 0, path.get());
}

[[maybe_unused]] const bool registered = Register({
    "HvdExt>ReadRange",
    {"path: string", "offset: int64", "nbytes: int64"},
    {"contents: string"},
    {},
    ReadRangeShapes,
    nullptr,
    RunReadRange,
    nullptr,
});

}  // namespace
}  // namespace hvd_ext
