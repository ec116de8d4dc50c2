// The word of a process that it is loading a sample, in the sample's entry.
//
// It holds the process's id (22 bits), 8 bits of a hash of when the process began and 8 of where its id means something
// (boot and pid namespace), and the time of the claim in eighths of a second (24 bits). A claim can be judged by any
// process that sees it: whether its owner still runs and for how long it has been claimed.
#pragma once

#include <cstdint>

namespace hvd_ext {

// Returns a claim of this process as of now.
uint64_t NewClaim();
// Whether the claim is one of this process.
bool IsOwnClaim(uint64_t claim);
// Whether the claim may be taken over: its owner has ended, or it is older than `claim_s`. A process of another
// container or host is judged by the claim's age alone.
bool IsStaleClaim(uint64_t claim, double claim_s);

}  // namespace hvd_ext
