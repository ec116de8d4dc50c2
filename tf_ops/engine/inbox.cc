#include "engine/inbox.h"

#include <utility>

namespace hvd_ext {

bool Inbox::Post(Work work) {
  {
    MutexLock lock(&mutex_);
    if (stopping_) return false;
    work_.push_back(std::move(work));
  }
  doorbell_->Ring(/*from_peer=*/false);
  return true;
}

void Inbox::Stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  doorbell_->Ring(/*from_peer=*/false);
}

std::vector<Inbox::Work> Inbox::Take() {
  std::vector<Work> taken;
  MutexLock lock(&mutex_);
  taken.swap(work_);
  return taken;
}

}  // namespace hvd_ext
