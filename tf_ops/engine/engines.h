// The engines of this process: the job's, and those of the process sets that this rank is in. Behind the C ABI (api.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"

namespace hvd_ext {

// Starts the job's engine: on MPI, or of one rank. kInvalid while one runs.
Status StartJob(const Config& config, bool mpi, bool shared_memory, std::shared_ptr<Engine>* engine);
// Starts an engine of some ranks of a running one, ascending, of which this is one; these call it together, each its
// sets in one order. `tag` numbers the set; equal on its ranks.
Status StartSet(int64_t parent, const std::vector<int>& ranks, int tag, Config config, bool shared_memory,
                std::shared_ptr<Engine>* engine);
// Stops an engine, and those of its sets (and of theirs) before it. `together`: all its ranks do so now, with nothing
// under way. *alone: see Engine::Stop; it counts for the sets too. Nothing where it does not run.
Status StopEngine(int64_t generation, bool together, bool* alone);
// Ends the job at once, where one runs.
void AbortJob(int code);
// See FinishMpi; an engine that is still being made counts as failed.
void FinishJob(bool failed, int code);

}  // namespace hvd_ext
