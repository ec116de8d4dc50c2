// What every transport must do.
#pragma once

#include <functional>

#include "engine/transport.h"

namespace hvd_ext::test {

using Contract = std::function<void(Transport*)>;

// Checks each part of the contract by `run`, which must call it with the transport of every rank at the same time.
void CheckContract(const std::function<void(const Contract&)>& run);

// A barrier of all ranks, so that one test's messages do not reach into the next.
void Meet(Transport* transport);

}  // namespace hvd_ext::test
