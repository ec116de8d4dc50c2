#include "engine/message.h"

#include <array>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "engine/check_call.h"

namespace hvd_ext {
namespace {

// Numbers travel as 8 bytes each, in this machine's order: all ranks of a job have processors of one kind.
class Writer {
 public:
  template <typename... Values>
  void operator()(const Values&... values) {
    (Put(values), ...);
  }

  std::string Take() { return std::move(bytes_); }

 private:
  void PutBytes(const void* value, size_t nbytes) { bytes_.append(static_cast<const char*>(value), nbytes); }

  void Put(int64_t value) { PutBytes(&value, sizeof(value)); }
  void Put(double value) { PutBytes(&value, sizeof(value)); }
  void Put(bool value) { Put(int64_t{value}); }
  template <typename Enum, std::enable_if_t<std::is_enum_v<Enum>, int> = 0>
  void Put(Enum value) {
    Put(static_cast<int64_t>(value));
  }
  void Put(const std::string& text) {
    Put(static_cast<int64_t>(text.size()));
    PutBytes(text.data(), text.size());
  }
  void Put(const Status& status) { (*this)(status.code, status.message); }
  template <typename T>
  void Put(const std::vector<T>& values) {
    Put(static_cast<int64_t>(values.size()));
    for (const T& value : values) Put(value);
  }
  template <typename T>
  void Put(const std::optional<T>& value) {
    Put(value.has_value());
    if (value) Put(*value);
  }

  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  template <typename... Values>
  bool operator()(Values&... values) {
    return (Get(&values) && ...);
  }

  bool AtEnd() const { return at_ == bytes_.size(); }

 private:
  bool GetBytes(void* value, size_t nbytes) {
    if (bytes_.size() - at_ < nbytes) return false;
    std::memcpy(value, bytes_.data() + at_, nbytes);
    at_ += nbytes;
    return true;
  }

  bool Get(int64_t* value) { return GetBytes(value, sizeof(*value)); }
  bool Get(double* value) { return GetBytes(value, sizeof(*value)); }
  bool Get(bool* value) {
    int64_t number = 0;
    if (!Get(&number) || number < 0 || number > 1) return false;
    *value = number == 1;
    return true;
  }
  template <typename Enum, std::enable_if_t<std::is_enum_v<Enum>, int> = 0>
  bool Get(Enum* value) {
    int64_t number = 0;
    if (!Get(&number) || static_cast<int64_t>(static_cast<Enum>(number)) != number) return false;
    *value = static_cast<Enum>(number);
    return true;
  }
  bool Get(std::string* text) {
    int64_t size = 0;
    if (!GetCount(1, &size)) return false;
    text->assign(bytes_, at_, static_cast<size_t>(size));
    at_ += static_cast<size_t>(size);
    return true;
  }
  bool Get(Status* status) { return (*this)(status->code, status->message); }
  template <typename T>
  bool Get(std::vector<T>* values) {
    int64_t count = 0;
    if (!GetCount(sizeof(int64_t), &count)) return false;
    values->resize(static_cast<size_t>(count));
    for (T& value : *values) {
      if (!Get(&value)) return false;
    }
    return true;
  }
  template <typename T>
  bool Get(std::optional<T>* value) {
    bool there = false;
    if (!Get(&there)) return false;
    value->reset();
    return !there || Get(&value->emplace());
  }

  // Reads a count of things that take at least `nbytes_each`. The rest of the message must be able to hold them, so
  // that no memory is taken for a count that is wrong.
  bool GetCount(int64_t nbytes_each, int64_t* count) {
    return Get(count) && *count >= 0 && *count <= static_cast<int64_t>(bytes_.size() - at_) / nbytes_each;
  }

  const std::string& bytes_;
  size_t at_ = 0;
};

// What a struct's type does not say.
template <typename T>
bool Fits(const T&) {
  return true;
}

bool Fits(const CallAnnouncement& m) {
  if (m.refusal) return true;
  return m.kind >= Kind::kAllreduce && m.kind <= Kind::kAlltoall && (!IsDivided(m.kind) || !m.shape.empty());
}

template <typename T>
bool ReadAs(Reader* reader, ControlMessage* message) {
  T& fields = message->emplace<T>();
  return std::apply(*reader, fields.Fields()) && reader->AtEnd() && Fits(fields);
}

template <size_t... kTypes>
bool Read(int64_t type, Reader* reader, ControlMessage* message, std::index_sequence<kTypes...>) {
  using ReadOne = bool (*)(Reader*, ControlMessage*);
  constexpr std::array<ReadOne, sizeof...(kTypes)> kRead = {
      &ReadAs<std::variant_alternative_t<kTypes, ControlMessage>>...};
  return type >= 0 && type < static_cast<int64_t>(kRead.size()) && kRead[static_cast<size_t>(type)](reader, message);
}

}  // namespace

std::string Encode(const ControlMessage& message) {
  Writer writer;
  writer(static_cast<int64_t>(message.index()));
  std::visit([&](const auto& m) { std::apply(writer, m.Fields()); }, message);
  return writer.Take();
}

Status Decode(const std::string& bytes, ControlMessage* message) {
  Reader reader(bytes);
  ControlMessage read;
  int64_t type = 0;
  constexpr auto kTypes = std::make_index_sequence<std::variant_size_v<ControlMessage>>();
  if (!reader(type) || !Read(type, &reader, &read, kTypes)) {
    return Internal("control message (" + std::to_string(bytes.size()) +
                    " bytes): it is cut short or too long; do all ranks run the same build of hvd_ext?");
  }
  *message = std::move(read);
  return Status::Ok();
}

}  // namespace hvd_ext
