#include "engine/codec.h"

#include <string>
#include <utility>

namespace hvd_ext {
namespace {

struct Entry {
  CodecName name;
  std::unique_ptr<VectorCodec> (*make)(std::shared_ptr<Feedback> feedback);
};

constexpr Entry kCodecs[] = {
    {CodecName::kTopK, MakeTopKCodec},
    {CodecName::kSign, MakeSignCodec},
};

Status CannotRun(const char* opcode) {
  return Invalid(std::string("the plan has the opcode ") + opcode +
                 ", which the bucket's codec does not have; choose a plan that adds whole vectors");
}

}  // namespace

bool IsVectorCodec(CodecName name) {
  for (const Entry& entry : kCodecs) {
    if (entry.name == name) return true;
  }
  return false;
}

std::unique_ptr<VectorCodec> MakeVectorCodec(std::shared_ptr<Feedback> feedback) {
  for (const Entry& entry : kCodecs) {
    if (entry.name == feedback->spec().codec) return entry.make(std::move(feedback));
  }
  return nullptr;  // Layout::Check refuses it
}

Status DamagedVector(const std::string& what) {
  return Communication("a message of a compressed gradient is damaged: " + what +
                       "; all ranks must run the same build of hvd_ext");
}

Status VectorCodec::Pack(const VectorWork&, int64_t, int64_t, float*) { return CannotRun("PACK"); }
Status VectorCodec::Take(const VectorWork&, const VectorMessage*, int64_t, int64_t) { return CannotRun("TAKE"); }
Status VectorCodec::Merge(const VectorWork&, const VectorMessage&, int64_t, int64_t) { return CannotRun("MERGE"); }

}  // namespace hvd_ext
