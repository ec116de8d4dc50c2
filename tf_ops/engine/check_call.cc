#include "engine/check_call.h"

#include <algorithm>
#include <iterator>

#include "engine/coordinator.h"

namespace hvd_ext {

bool IsDivided(Kind kind) {
  return kind == Kind::kAllgather || kind == Kind::kReducescatter || kind == Kind::kAlltoall;
}

bool NeedsPlan(Kind kind) { return kind == Kind::kAllreduce || kind == Kind::kBroadcast || IsDivided(kind); }

Status CheckUnits(const CallSpec& spec, int64_t units, int64_t size) {
  if (!IsDivided(spec.kind)) return Status::Ok();
  bool pairs = spec.kind == Kind::kAlltoall;
  if (units == (pairs ? size * size : size)) return Status::Ok();
  return Invalid(NameOfCall(spec) + ": its plan must have one unit for each of the " + std::to_string(size) + " ranks" +
                 (pairs ? " and each of their peers" : "") + ", it has " + std::to_string(units));
}

Status CheckCall(const CallSpec& spec, int size, const void* input, int rank) {
  if (spec.name.empty()) return Invalid("a collective must have a name, this one's is empty");
  std::string name = NameOfCall(spec) + ": ";
  if (spec.kind == Kind::kExchange) return Invalid(name + "an exchange is made by Exchange");
  if (!NeedsPlan(spec.kind)) {
    return spec.kind == Kind::kBarrier ? Status::Ok() : Invalid("collective '" + spec.name + "': its kind is unknown");
  }
  if (SizeOf(spec.dtype) == 0)
    return Invalid(name + "dtype (" + std::to_string(static_cast<int>(spec.dtype)) + ") is unknown");
  if ((spec.kind == Kind::kAllreduce || spec.kind == Kind::kReducescatter) && spec.dtype == DType::kBytes) {
    return Invalid(name + "bytes cannot be reduced");
  }
  if (std::find(std::begin(kReduceOps), std::end(kReduceOps), spec.op) == std::end(kReduceOps)) {
    return Invalid(name + "op (" + std::to_string(static_cast<int>(spec.op)) +
                   ") must be sum (0), average (1), minimum (2), maximum (3) or product (4)");
  }
  HVD_EXT_RETURN_IF_ERROR(CheckWire(name, spec.dtype, spec.wire));
  if (spec.wire && spec.kind != Kind::kAllreduce && spec.kind != Kind::kReducescatter) {
    return Invalid(name + "only a reduction may have a wire dtype");
  }
  if (IsDivided(spec.kind) && spec.shape.empty()) {
    return Invalid(name + "the tensor must have a dimension 0 to be " +
                   (spec.kind == Kind::kAllgather ? "joined" : "divided") +
                   " along, it is a scalar; reshape it to [1]");
  }
  if (spec.kind == Kind::kBroadcast && (spec.root < 0 || spec.root >= size)) {
    return Invalid(name + "root rank (" + std::to_string(spec.root) + ") must be in [0, " + std::to_string(size) + ")");
  }
  int64_t elements = 1;
  bool overflows = false;
  for (int64_t n : spec.shape) {
    if (n < 0) return Invalid(name + "a dimension (" + std::to_string(n) + ") must not be negative");
    overflows |= __builtin_mul_overflow(elements, n, &elements);
  }
  if (overflows || elements > (int64_t{1} << 59))
    return Invalid(name + "its shape has more elements than can be counted");
  bool reads = spec.kind != Kind::kBroadcast || spec.root == rank;
  if (reads && elements > 0 && input == nullptr) return Invalid(name + "its input is null");
  return Status::Ok();
}

Status CheckWire(const std::string& where, DType dtype, std::optional<DType> wire) {
  if (!wire) return Status::Ok();
  if (!IsWire(*wire)) {
    return Invalid(where + "wire dtype (" + std::to_string(static_cast<int>(*wire)) + ") must be float16 or bfloat16");
  }
  if (dtype == DType::kFloat32) return Status::Ok();
  return Invalid(where + "only float32 may be sent as " + NameOf(*wire) + ", this is " + NameOf(dtype));
}

}  // namespace hvd_ext
