// The rounds of the channels that do not wait for all ranks: who tells whom that a gradient is there and that a round
// is open, and the start of a round on the channel's lane.
//
// A rank tells rank 0 of each whole gradient. Rank 0 opens rounds by the channel's rules, and the word goes along a
// tree: from rank 0 to the first ranks of the hosts, and from each of these to the others of its host.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "engine/channel.h"
#include "engine/control.h"
#include "engine/core.h"
#include "engine/lanes.h"
#include "engine/message.h"
#include "engine/partial_gate.h"
#include "engine/rounds.h"

namespace hvd_ext {

// A channel whose rounds are partial, and its gate.
struct PartialChannel {
  std::shared_ptr<Channel> channel;
  PartialGate* gate = nullptr;
};

class PartialRounds {
 public:
  PartialRounds(Core* core, Control* control, Lanes* lanes) : core_(core), control_(control), lanes_(lanes) {}

  // The channel has been opened, or closed, on this rank.
  void Open(const PartialChannel& opened) HVD_EXT_REQUIRES(progress_role);
  void Close(int64_t lane) HVD_EXT_REQUIRES(progress_role) { lanes_of_.erase(lane); }
  // A gradient of this rank may be there, or a step may have been skipped, if the lane's rounds are partial.
  void Arrive(int64_t lane) HVD_EXT_REQUIRES(progress_role);
  // This rank gives no gradients until all ranks have left.
  void Leave(int64_t lane) HVD_EXT_REQUIRES(progress_role);
  void SetQuorum(int64_t lane, int64_t quorum) HVD_EXT_REQUIRES(progress_role);

  void Handle(int peer, const RoundArrival& arrival) HVD_EXT_REQUIRES(progress_role);
  void Handle(const RoundsOpen& open) HVD_EXT_REQUIRES(progress_role);

  // Fails lanes that wait for a round which can never begin, because a rank has left the job or closed the channel. On
  // rank 0: warns of rounds that have waited for long to be opened. An error: one has waited for longer than the limit.
  Status Watch() HVD_EXT_REQUIRES(progress_role);

  // Whether a word of a peer may come at any time, also while this rank has nothing under way.
  bool listening() const HVD_EXT_REQUIRES(progress_role) { return !lanes_of_.empty(); }

 private:
  struct Lane : PartialChannel {
    explicit Lane(const PartialChannel& opened) : PartialChannel(opened) {}
    std::optional<RoundOpener> opener;  // on rank 0
    int64_t announced = 0;              // the newest round that rank 0 has told of
    std::vector<int> relays;            // to whom this rank passes the word on
    int64_t watched = 0;                // the round that waits to be opened
    double waits_s = 0;                 // since when
    std::vector<int> named;             // the ranks that the last warning of this round has named
    int64_t lost = 0;                   // the round for which this rank waits although a rank is gone; 0: none
    double lost_s = 0;                  // since when
  };
  // What has come for a lane that this rank has not opened yet.
  struct Early {
    std::vector<std::pair<int, RoundArrival>> arrivals;
    std::vector<RoundsOpen> opens;
  };

  Lane* Find(int64_t lane) HVD_EXT_REQUIRES(progress_role);
  void TellOpened(int64_t number, Lane* lane) HVD_EXT_REQUIRES(progress_role);
  void Start(Lane* lane) HVD_EXT_REQUIRES(progress_role);
  void WatchGone(int64_t number, Lane* lane) HVD_EXT_REQUIRES(progress_role);

  Core* const core_;
  Control* const control_;
  Lanes* const lanes_;
  std::map<int64_t, Lane> lanes_of_ HVD_EXT_GUARDED_BY(progress_role);
  std::map<int64_t, Early> early_ HVD_EXT_GUARDED_BY(progress_role);
};

// To whom `rank` passes a word on that comes from rank 0: a binomial tree over the first ranks of the hosts, each of
// which tells the others of its host. `hosts` has the host of each rank.
std::vector<int> RelaysOf(const std::vector<int>& hosts, int rank);

}  // namespace hvd_ext
