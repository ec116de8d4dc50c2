#include "engine/host_peers.h"

#include <algorithm>
#include <array>
#include <exception>
#include <string>
#include <utility>

#include "engine/swap.h"
#include "shm/host.h"

namespace hvd_ext {
namespace {

// Counts the layouts of what lies in shared memory. Ranks whose libraries have different ones do not share memory.
constexpr uint64_t kLayout = 4;

// What every rank tells all others.
struct Card {
  uint64_t layout = kLayout;
  uint64_t host = 0;
  ArenaAddress arena;
  int64_t bell = 0;  // where the doorbell lies in the arena
  int64_t shares = 0;
  Device::BlockName block;        // a block of the device, where it can be shared
  std::array<char, 32> device{};  // its name
};

// What two ranks of one host tell each other.
struct Answer {
  int64_t opened = 0;
  int64_t ring = 0;  // where the ring lies that the other rank writes to
  Medium medium = Medium::kNone;
};

// A block of the device by which peers find out whether they reach its memory.
class Sample {
 public:
  Sample(Device* device, Card* card) : device_(device) {
    if (device_ == nullptr) return;
    try {
      data_ = device_->Allocate(1);
      int64_t offset = 0;
      shared_ = device_->Share(data_, &name_, &offset);
      device_->Name().copy(own_.data(), own_.size());
    } catch (const std::exception&) {  // messages lie in host memory then; what fails without a sample says why
      return;
    }
    card->shares = shared_;
    card->block = name_;
    card->device = own_;
  }
  ~Sample() {
    if (shared_) device_->Unshare(name_);
    if (data_ != nullptr) device_->Free(data_);
  }
  Sample(const Sample&) = delete;
  Sample& operator=(const Sample&) = delete;

  // What joins this rank's device and that of the rank with this card.
  Medium MediumTo(const Card& other) const {
    if (device_ == nullptr) return Medium::kNone;
    char* reached = shared_ && other.shares != 0 ? device_->Reach(other.block) : nullptr;
    if (reached == nullptr) return Medium::kHostMemory;
    const Medium medium = IsMine(other) ? Medium::kNvlink : device_->MediumTo(reached);
    device_->Leave(reached);
    return medium;
  }

 private:
  bool IsMine(const Card& other) const { return own_[0] != 0 && other.device == own_; }

  Device* const device_;
  char* data_ = nullptr;
  bool shared_ = false;
  Device::BlockName name_;
  std::array<char, 32> own_{};  // the device's name
};

}  // namespace

Status FindHostPeers(Transport* between, const std::shared_ptr<Arena>& arena, Doorbell::Word* bell, Device* device,
                     std::vector<std::unique_ptr<HostPeer>>* peers) {
  const size_t size = static_cast<size_t>(between->size());
  peers->clear();
  peers->resize(size);
  const std::vector<int> others = OtherRanks(*between);
  Card mine;
  mine.host = HostIdentity();
  if (arena != nullptr) {
    mine.arena = arena->address();
    mine.bell = arena->OffsetOf(bell);
  }
  const Sample sample(device, &mine);
  std::vector<Card> cards(size);
  HVD_EXT_RETURN_IF_ERROR(Swap(between, others, std::vector<Card>(size, mine), &cards));

  // Both ranks of a pair come here or neither.
  std::vector<int> near;
  std::vector<Answer> answers(size), heard(size);
  for (int rank : others) {
    const Card& card = cards[static_cast<size_t>(rank)];
    if (arena == nullptr || card.arena.fd < 0 || card.layout != kLayout || card.host != mine.host) continue;
    near.push_back(rank);
    char* ring = arena->Take(sizeof(HostRing::Memory));
    auto peer = std::make_unique<HostPeer>();
    if (ring == nullptr || !MappedArena::Open(card.arena, &peer->memory).ok()) continue;
    peer->in = HostRing(reinterpret_cast<HostRing::Memory*>(ring));
    answers[static_cast<size_t>(rank)] = {1, arena->OffsetOf(ring), sample.MediumTo(card)};
    (*peers)[static_cast<size_t>(rank)] = std::move(peer);
  }
  HVD_EXT_RETURN_IF_ERROR(Swap(between, near, answers, &heard));
  for (int rank : near) {
    std::unique_ptr<HostPeer>& peer = (*peers)[static_cast<size_t>(rank)];
    const Answer& answer = heard[static_cast<size_t>(rank)];
    if (peer == nullptr || !answer.opened) {
      peer.reset();
      continue;
    }
    char* ring = peer->memory->At(answer.ring, sizeof(HostRing::Memory));
    char* word = peer->memory->At(cards[static_cast<size_t>(rank)].bell, sizeof(Doorbell::Word));
    if (ring == nullptr || word == nullptr) {
      return Internal("shared memory with rank " + std::to_string(rank) + ": its ring lies outside of its arena");
    }
    peer->out = HostRing(reinterpret_cast<HostRing::Memory*>(ring));
    peer->bell = std::make_unique<Doorbell>(reinterpret_cast<Doorbell::Word*>(word));
    const Medium mine_to_it = answers[static_cast<size_t>(rank)].medium;
    const bool has_none = mine_to_it == Medium::kNone || answer.medium == Medium::kNone;
    peer->medium = has_none ? Medium::kNone : std::max(mine_to_it, answer.medium);  // the slower one counts
  }
  return Status::Ok();
}

}  // namespace hvd_ext
