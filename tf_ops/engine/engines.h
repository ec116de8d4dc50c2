// The engines of this process: the job's, and those of the process sets that this rank is in. Behind the C ABI (api.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"

namespace hvd_ext {

// Makes the transport of a job that all others stand in front of.
using MakeBase = std::function<Status(std::shared_ptr<Transport>*)>;
// Starts the job's engine; null makes one of one rank. kInvalid while one runs.
Status StartJob(Config config, const MakeBase& make, std::shared_ptr<Engine>* engine);
// Starts an engine for some ranks of a running one. `ranks` ascend, and this rank is one of them. These ranks call it
// together; ranks that share several sets start them in one order. `tag` numbers the set, and is equal on its ranks.
Status StartSet(int64_t parent, const std::vector<int>& ranks, int tag, Config config, std::shared_ptr<Engine>* engine);
// Stops an engine, and before it those of its sets, of their sets and so on. `together`: all its ranks do so now, with
// nothing under way. *alone: as Engine::Stop returns, of any of them. Does nothing where the engine does not run.
Status StopEngine(int64_t generation, bool together, bool* alone);
// Ends the job at once, where one runs.
void AbortJob(int code);
// FinishMpi for the job. An engine that is still being made counts as a failure.
void FinishJob(bool failed, int code);

}  // namespace hvd_ext
