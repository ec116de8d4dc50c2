#include "engine/codec.h"

#include <map>
#include <string>
#include <utility>

namespace hvd_ext {
namespace {

std::map<std::string, VectorCodecMaker>& Makers() {
  static auto* makers = new std::map<std::string, VectorCodecMaker>;
  return *makers;
}

Status CannotRun(const char* opcode) {
  return Invalid(std::string("the plan has the opcode ") + opcode +
                 ", which the bucket's codec does not have; choose a plan that adds whole vectors");
}

}  // namespace

void AddVectorCodec(const char* name, VectorCodecMaker make) { Makers()[name] = make; }

bool IsVectorCodec(const std::string& name) { return Makers().count(name) > 0; }

std::unique_ptr<VectorCodec> MakeVectorCodec(std::shared_ptr<Feedback> feedback) {
  auto maker = Makers().find(feedback->spec().codec);
  return maker == Makers().end() ? nullptr : maker->second(std::move(feedback));
}

Status DamagedVector(const std::string& what) {
  return Communication("a message of a compressed gradient is damaged: " + what +
                       "; all ranks must run the same build of hvd_ext");
}

Status VectorCodec::Reselect(const VectorWork&, int64_t, int64_t, const float*) { return CannotRun("RESELECT"); }
Status VectorCodec::Pack(const VectorWork&, int64_t, int64_t, float*) { return CannotRun("PACK"); }
Status VectorCodec::Take(const VectorWork&, const VectorMessage*, int64_t, int64_t) { return CannotRun("TAKE"); }
Status VectorCodec::Merge(const VectorWork&, const VectorMessage&, int64_t, int64_t) { return CannotRun("MERGE"); }

}  // namespace hvd_ext
