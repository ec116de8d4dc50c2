// HvdExt>ReadRange: a range of a file of this machine, as a string: a member of an archive, or a record of a TFRecord
// file, behind which its checksum lies.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "cache/api.h"
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

// Of TFRecord files: tensorflow/core/lib/hash/crc32c.h.
uint32_t Masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }

// Reads `wanted` bytes; returns false after a failure.
bool ReadAt(Run& run, const File& file, const std::string& path, int64_t offset, int64_t wanted, char* to) {
  for (int64_t done = 0; done < wanted;) {
    ssize_t got = pread(file.descriptor(), to + done, static_cast<size_t>(wanted - done), offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      FailAt(run, path, "does not read");
      return false;
    }
    if (got == 0) {
      run.Fail(TF_DATA_LOSS,
               "file (" + path + "): ended at byte " + std::to_string(offset + done) + " while it was read");
      return false;
    }
    done += got;
  }
  return true;
}

struct ReadRangeKernel {
  bool checked = false;
};

void* MakeReadRange(TF_OpKernelConstruction* construction) {
  StatusPointer status(TF_NewStatus());
  TF_Bool checked = 0;
  TF_OpKernelConstruction_GetAttrBool(construction, "checked", &checked, status.get());
  if (TF_GetCode(status.get()) != TF_OK) TF_OpKernelConstruction_Failure(construction, status.get());
  return new ReadRangeKernel{checked != 0};
}

void DropReadRange(void* kernel) { delete static_cast<ReadRangeKernel*>(kernel); }

void RunReadRange(void* made, TF_OpKernelContext* context) {
  const bool checked = static_cast<ReadRangeKernel*>(made)->checked;
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
  if (!ReadAt(run, file, path, offset, wanted, to) || !checked) return;
  uint32_t kept = 0;
  if (!ReadAt(run, file, path, offset + wanted, sizeof(kept), reinterpret_cast<char*>(&kept))) return;
  if (Masked(hvd_ext_cache_crc32c(0, to, wanted)) != kept) {
    run.Fail(TF_DATA_LOSS, "file (" + path + "): the checksum of the " + std::to_string(wanted) + " bytes from byte " +
                               std::to_string(offset) + " on is wrong: the file is damaged");
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
    {"checked: bool"},
    ReadRangeShapes,
    MakeReadRange,
    RunReadRange,
    DropReadRange,
});

}  // namespace
}  // namespace hvd_ext
