// An engine as its parts, in the order in which they need each other. Each part owns its data and the lock that guards
// it: the inbox, the registry and each channel have a mutex of their own and may be called by any thread; the parts
// from Control on belong to whoever has the progress role.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/calls.h"
#include "engine/control.h"
#include "engine/core.h"
#include "engine/engine.h"
#include "engine/executor.h"
#include "engine/inbox.h"
#include "engine/joining.h"
#include "engine/lanes.h"
#include "engine/partial_rounds.h"
#include "engine/progress_loop.h"
#include "engine/registry.h"
#include "engine/stall_watch.h"

namespace hvd_ext {

class Engine::State {
 public:
  State(std::shared_ptr<Transport> transport, const Config& config, int64_t generation)
      : core(std::move(transport), config, generation) {}

  // Makes the deliveries, then calls `then` (may be null), both on the engine's thread. Where the engine stops already,
  // the deliveries are made on this one, and `then` is left out.
  void PostDeliveries(std::vector<Delivery> ended, std::function<void()> then);
  Status Announce(const std::shared_ptr<OpenCall>& call);
  // Has the engine's thread do the work. An error says why it cannot any more.
  Status Post(std::function<void()> work);
  Status BeginStep(int64_t handle, const std::optional<TopKStep>& topk);
  // The same without the call that is due before a step. Fails the lane where parts of a broken step are on their way.
  Status BeginStep(const std::shared_ptr<Channel>& channel, const std::optional<TopKStep>& topk, bool skips,
                   int64_t* step);
  // Tells the ranks that have joined, if any, that a step of the channel has begun or ended.
  void AnnounceStep(const std::shared_ptr<Channel>& channel);
  Status FindPartial(int64_t handle, PartialChannel* found) const;
  // Has the engine's thread do something with the rounds of a partial channel.
  Status PostRounds(const PartialChannel& partial, std::function<void(PartialRounds*, int64_t lane)> work);
  // Submits a tensor, which `write(buffer, offset, arriving)` puts into its bucket's buffer; `arriving` may be null.
  template <typename Write>
  Status Submit(const std::shared_ptr<Channel>& channel, int64_t tensor, int64_t nbytes, int64_t* ticket,
                const Write& write);
  // Has the engine's thread look at the channel: runs are ready, or a gradient is there.
  Status PostReady(const std::shared_ptr<Channel>& channel);

  Core core;
  Inbox inbox{core.transport->doorbell()};
  Registry registry{&core, &inbox};
  Control control{&core};
  Executor executor{core.transport.get(), &core.messages, core.config.window, &core.trace, core.device};
  Calls calls{&core, &control, &executor};
  Lanes lanes{&core, &control, &registry, &executor};
  PartialRounds rounds{&core, &control, &lanes};
  StallWatch stalls{&core, &control, &registry, &lanes, &executor};
  Joining joining{&core, &control, &registry, &executor, &calls, &lanes};
  ProgressLoop loop{&core, &inbox, &registry, &control, &executor, &calls, &lanes, &rounds, &stalls, &joining};

  Mutex thread_mutex;
  std::thread thread HVD_EXT_GUARDED_BY(thread_mutex);
};

}  // namespace hvd_ext
