// Connections between the ranks of different hosts, made when a job starts.
#pragma once

#include <vector>

#include "engine/transport.h"

namespace hvd_ext {

// Connects this rank with every rank of another host, by one TCP connection for each pair. sockets[r] is the connection
// with rank r, which does not block, or -1 where there is none: r is this rank, is a rank of this host, or cannot be
// reached. Both ranks of a pair come to the same answer. A rank proves by a token that it belongs to the job: it has
// got the token over `between`.
//
// All ranks call it together, before any other message.
Status ConnectTcpPeers(Transport* between, const TcpOptions& options, std::vector<int>* sockets);

}  // namespace hvd_ext
