#include "engine/host_peers.h"

#include <string>
#include <utility>

#include "engine/swap.h"
#include "shm/host.h"

namespace hvd_ext {
namespace {

// Counts the layouts of what lies in shared memory. Ranks whose libraries have different ones do not share memory.
constexpr uint64_t kLayout = 2;

// What every rank tells all others.
struct Card {
  uint64_t layout = kLayout;
  uint64_t host = 0;
  ArenaAddress arena;
  int64_t bell = 0;  // where the doorbell lies in the arena
};

// What two ranks of one host tell each other.
struct Answer {
  int64_t opened = 0;
  int64_t ring = 0;  // where the ring lies that the other rank writes to
};

}  // namespace

Status FindHostPeers(Transport* between, const std::shared_ptr<Arena>& arena, Doorbell::Word* bell,
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
    answers[static_cast<size_t>(rank)] = {1, arena->OffsetOf(ring)};
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
  }
  return Status::Ok();
}

}  // namespace hvd_ext
