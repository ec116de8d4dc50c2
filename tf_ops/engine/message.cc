#include "engine/message.h"

#include <cstring>
#include <utility>

namespace hvd_ext {
namespace {

void Put(int64_t value, std::string* bytes) { bytes->append(reinterpret_cast<const char*>(&value), sizeof(value)); }

void Put(const std::string& text, std::string* bytes) {
  Put(static_cast<int64_t>(text.size()), bytes);
  bytes->append(text);
}

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  bool Get(int64_t* value) {
    if (bytes_.size() - at_ < sizeof(*value)) return false;
    std::memcpy(value, bytes_.data() + at_, sizeof(*value));
    at_ += sizeof(*value);
    return true;
  }

  bool Get(std::string* text) {
    int64_t size = 0;
    if (!GetCount(1, &size)) return false;
    text->assign(bytes_, at_, static_cast<size_t>(size));
    at_ += static_cast<size_t>(size);
    return true;
  }

  // A count of things that take at least `nbytes_each`: never more than the rest of the message can hold.
  bool GetCount(int64_t nbytes_each, int64_t* count) {
    return Get(count) && *count >= 0 && *count <= static_cast<int64_t>(bytes_.size() - at_) / nbytes_each;
  }

  bool AtEnd() const { return at_ == bytes_.size(); }

 private:
  const std::string& bytes_;
  size_t at_ = 0;
};

// How many numbers and texts a message of this type has at least; false for an unknown type.
bool Needs(MessageType type, size_t* numbers, size_t* texts) {
  *numbers = 0;
  *texts = 0;
  switch (type) {
    case MessageType::kAnnounce:
      *numbers = 7;
      *texts = 1;
      return true;
    case MessageType::kReport:
      *numbers = 4;
      return true;
    case MessageType::kAsk:
      *numbers = 2;
      return true;
    case MessageType::kLaneClosed:
    case MessageType::kProbe:
    case MessageType::kVerdict:
      *numbers = 1;
      return true;
    case MessageType::kStart:
    case MessageType::kRefuse:
    case MessageType::kKnown:
    case MessageType::kLaneFailed:
    case MessageType::kFailed:
    case MessageType::kLeave:
      return true;
  }
  return false;
}

bool Read(const std::string& bytes, Message* message) {
  Reader reader(bytes);
  int64_t type = 0, code = 0, count = 0;
  if (!reader.Get(&type) || !reader.Get(&message->id) || !reader.Get(&code) || !reader.Get(&message->text))
    return false;
  message->type = static_cast<MessageType>(type);
  message->code = static_cast<Code>(code);
  if (!reader.GetCount(sizeof(int64_t), &count)) return false;
  message->numbers.resize(static_cast<size_t>(count));
  for (int64_t& number : message->numbers) {
    if (!reader.Get(&number)) return false;
  }
  if (!reader.GetCount(sizeof(int64_t), &count)) return false;
  message->texts.resize(static_cast<size_t>(count));
  for (std::string& text : message->texts) {
    if (!reader.Get(&text)) return false;
  }
  size_t numbers = 0, texts = 0;
  return reader.AtEnd() && Needs(message->type, &numbers, &texts) && message->numbers.size() >= numbers &&
         message->texts.size() >= texts;
}

}  // namespace

std::string Encode(const Message& message) {
  std::string bytes;
  Put(static_cast<int64_t>(message.type), &bytes);
  Put(message.id, &bytes);
  Put(static_cast<int64_t>(message.code), &bytes);
  Put(message.text, &bytes);
  Put(static_cast<int64_t>(message.numbers.size()), &bytes);
  for (int64_t number : message.numbers) Put(number, &bytes);
  Put(static_cast<int64_t>(message.texts.size()), &bytes);
  for (const std::string& text : message.texts) Put(text, &bytes);
  return bytes;
}

Status Decode(const std::string& bytes, Message* message) {
  Message read;
  if (!Read(bytes, &read)) {
    return Internal("control message (" + std::to_string(bytes.size()) +
                    " bytes): it is cut short or too long; do all ranks run the same build of hvd_ext?");
  }
  *message = std::move(read);
  return Status::Ok();
}

}  // namespace hvd_ext
