// HvdExt>ReadRange: a range of a file of this machine, as a string: a member of an archive, or a record of a TFRecord
// file, behind which its checksum lies.
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "cache/api.h"
#include "cache/file.h"
#include "ops/data/capi.h"

namespace hvd_ext {
namespace {

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

void FailAt(Run& run, const std::string& path, const char* what, int error = errno) {
  run.Fail(CodeOfErrno(error), "file (" + path + "): " + what + ": " + std::strerror(error));
}

// Of TFRecord files: tensorflow/core/lib/hash/crc32c.h.
uint32_t Masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8u; }

// Reads `wanted` bytes; returns false after a failure.
bool MustRead(Run& run, const File& file, const std::string& path, int64_t offset, int64_t wanted, char* to) {
  int64_t seen = 0;
  const int error = ReadAt(file.fd(), to, wanted, offset, &seen);
  if (error != 0) {
    FailAt(run, path, "does not read", error);
  } else if (seen < wanted) {
    run.Fail(TF_DATA_LOSS,
             "file (" + path + "): ended at byte " + std::to_string(offset + seen) + " while it was read");
  }
  return run.ok();
}

void RunReadRange(void* made, TF_OpKernelContext* context) {
  const bool checked = *static_cast<bool*>(made);
  Run run(context);
  const TF_TString* named = run.StringScalar(0, "path");
  int64_t offset = run.Scalar(1, "offset"), nbytes = run.Scalar(2, "nbytes");
  TF_Tensor* output = run.Output(0, TF_STRING, {});
  if (!run.ok()) return;
  if (offset < 0) return run.Fail(TF_INVALID_ARGUMENT, "offset (" + std::to_string(offset) + "): must not be negative");
  const std::string path(TF_TString_GetDataPointer(named), TF_TString_GetSize(named));
  if (path.find('\0') != std::string::npos) return run.Fail(TF_INVALID_ARGUMENT, "path: has a byte 0 in it");
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat about;
  if (file.fd() < 0) return FailAt(run, path, "does not open");
  if (fstat(file.fd(), &about) != 0) return FailAt(run, path, "does not say its size");
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
  if (!MustRead(run, file, path, offset, wanted, to) || !checked) return;
  uint32_t kept = 0;
  if (!MustRead(run, file, path, offset + wanted, sizeof(kept), reinterpret_cast<char*>(&kept))) return;
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
    [](TF_OpKernelConstruction* construction) { return MakeFlag(construction, "checked"); },
    RunReadRange,
    DropFlag,
});

}  // namespace
}  // namespace hvd_ext
