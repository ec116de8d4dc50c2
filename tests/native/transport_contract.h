// What every transport must do. All ranks of a transport call each of these functions, on any number of ranks.
#pragma once

#include <vector>

#include "engine/transport.h"

namespace hvd_ext::test {

// Every pair exchanges messages of many lengths at once, from 0 bytes to several of MPI's parts.
void MessagesArriveWhole(Transport* transport);
// Messages of one sender, receiver and tag match receives in order, however long each is.
void MessagesOfOneTagKeepTheirOrder(Transport* transport);
// Messages with the largest tag that the transport names arrive.
void TheLargestTagCarriesMessages(Transport* transport);
// Tags may be received in another order than sent.
void TagsAreIndependent(Transport* transport);
// A ring of large messages in both directions at once.
void OpposingLargeMessagesDoNotBlock(Transport* transport);
// All control messages are sent before the first is received; some empty, some long, some to the rank itself.
void ControlMessagesKeepTheirOrder(Transport* transport);
// ReceiveControl says at once that nothing has arrived.
void NoControlMessageMeansMinusOne(Transport* transport);
// Data and control under way together do not meet.
void DataAndControlDoNotMeet(Transport* transport);
// A message received without a copy is whole, and its send ends when the receiver lets go of it.
void MessagesReceivedWithoutACopyStay(Transport* transport);
// A message shorter than expected is reported as a bug, with its peer and both lengths.
void ShortMessagesAreReported(Transport* transport);

// A message of another run, or of another segment of it, is never given to a receive, however long it is: the receive
// fails, and its words name both.
void MessagesOfOtherRunsAreRefused(Transport* transport);

// All of these that take little time.
const std::vector<void (*)(Transport*)>& Contracts();

// A barrier of all ranks, so that one test's messages do not reach into the next.
void Meet(Transport* transport);

}  // namespace hvd_ext::test
