#include "engine/tcp_peers.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <sstream>
#include <utility>

#include "engine/swap.h"
#include "shm/host.h"

namespace hvd_ext {
namespace {

using Clock = std::chrono::steady_clock;
using Token = std::array<uint64_t, 2>;

// Counts the layouts of what lies below and of a message on a connection. Ranks with different ones use MPI.
constexpr uint64_t kLayout = 1;
constexpr int kMostAddresses = 16;
constexpr auto kAttempt = std::chrono::milliseconds(1500);     // for one address
constexpr auto kAltogether = std::chrono::milliseconds(6000);  // after this time a pair uses `between`

// A descriptor that closes itself.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

struct Address {
  int32_t family = 0;  // AF_INET or AF_INET6
  uint32_t netmask_bits = 0;
  unsigned char bytes[16] = {};
};

// What every rank tells all others.
struct Card {
  uint64_t layout = kLayout;
  uint64_t host = 0;
  Token token{};
  int32_t port_v4 = 0, port_v6 = 0;  // 0: it does not listen
  int32_t addresses = 0, unused = 0;
  Address address[kMostAddresses];
};

// The first bytes on a connection, from the rank that connects; the other one answers with `token` of that rank.
struct Hello {
  Token token{};  // of the rank that is called
  int32_t from = 0, to = 0;
};

uint32_t CountBits(const void* bytes, size_t nbytes) {
  uint32_t bits = 0;
  for (size_t i = 0; i < nbytes; ++i) {
    bits += static_cast<uint32_t>(__builtin_popcount(static_cast<const unsigned char*>(bytes)[i]));
  }
  return bits;
}

bool SharesNetwork(const Address& a, const Address& b) {
  if (a.family != b.family) return false;
  for (uint32_t bit = 0; bit < a.netmask_bits; ++bit) {
    if (((a.bytes[bit / 8] ^ b.bytes[bit / 8]) >> (7 - bit % 8)) & 1) return false;
  }
  return true;
}

// The network that text such as "10.0.0.0/24" names; the family is 0 where it names none.
Address NetworkOf(const std::string& text) {
  Address network;
  const size_t slash = text.find('/');
  if (slash == std::string::npos) return network;
  const std::string begin = text.substr(0, slash), bits = text.substr(slash + 1);
  if (bits.empty() || bits.size() > 3 || bits.find_first_not_of("0123456789") != std::string::npos) return network;
  for (int family : {AF_INET, AF_INET6}) {
    if (inet_pton(family, begin.c_str(), network.bytes) == 1) network.family = family;
  }
  network.netmask_bits = std::min<uint32_t>(std::stoul(bits), network.family == AF_INET ? 32 : 128);
  return network;
}

// Whether a list such as "eth0,10.0.0.0/24" names the interface or a network that has the address.
bool IsListed(const std::string& interfaces, const char* name, const Address& address) {
  if (interfaces.empty()) return true;
  std::istringstream list(interfaces);
  for (std::string one; std::getline(list, one, ',');) {
    if (one == name || SharesNetwork(NetworkOf(one), address)) return true;
  }
  return false;
}

// This host's addresses. Those that say nothing outside of the host (loopback, link-local) are left out, unless the
// ranks of one host are to be connected.
std::vector<Address> FindAddresses(const std::string& interfaces, bool inside_too) {
  std::vector<Address> found;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return found;
  for (ifaddrs* at = first; at != nullptr && found.size() < kMostAddresses; at = at->ifa_next) {
    bool loopback = (at->ifa_flags & IFF_LOOPBACK) != 0;
    if (at->ifa_addr == nullptr || at->ifa_netmask == nullptr || (at->ifa_flags & IFF_UP) == 0) continue;
    if (loopback && !inside_too) continue;
    Address address;
    address.family = at->ifa_addr->sa_family;
    if (address.family == AF_INET) {
      std::memcpy(address.bytes, &reinterpret_cast<sockaddr_in*>(at->ifa_addr)->sin_addr, 4);
      address.netmask_bits = CountBits(&reinterpret_cast<sockaddr_in*>(at->ifa_netmask)->sin_addr, 4);
    } else if (address.family == AF_INET6) {
      const in6_addr& v6 = reinterpret_cast<sockaddr_in6*>(at->ifa_addr)->sin6_addr;
      if (IN6_IS_ADDR_LINKLOCAL(&v6)) continue;
      std::memcpy(address.bytes, &v6, 16);
      address.netmask_bits = CountBits(&reinterpret_cast<sockaddr_in6*>(at->ifa_netmask)->sin6_addr, 16);
    } else {
      continue;
    }
    if (loopback || IsListed(interfaces, at->ifa_name, address)) found.push_back(address);
  }
  freeifaddrs(first);
  return found;
}

// The peer's addresses in the order in which they are tried: first those in a network of this host. One that this host
// has as well (a bridge of containers) leads to this host, and is left out.
std::vector<Address> Candidates(const Card& mine, const Card& theirs, bool inside_too) {
  std::vector<Address> near, far;
  for (int i = 0; i < theirs.addresses; ++i) {
    const Address& address = theirs.address[i];
    bool shares = false, own = false;
    for (int j = 0; j < mine.addresses; ++j) {
      shares |= SharesNetwork(mine.address[j], address);
      own |= mine.address[j].family == address.family && std::memcmp(mine.address[j].bytes, address.bytes, 16) == 0;
    }
    if (own && !inside_too) continue;
    (shares ? near : far).push_back(address);
  }
  near.insert(near.end(), far.begin(), far.end());
  return near;
}

socklen_t ToSockaddr(const Address& address, int port, sockaddr_storage* to) {
  std::memset(to, 0, sizeof(*to));
  if (address.family == AF_INET) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(to);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
    std::memcpy(&v4->sin_addr, address.bytes, 4);
    return sizeof(sockaddr_in);
  }
  auto* v6 = reinterpret_cast<sockaddr_in6*>(to);
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons(static_cast<uint16_t>(port));
  std::memcpy(&v6->sin6_addr, address.bytes, 16);
  return sizeof(sockaddr_in6);
}

// Listens at a port that the kernel chooses; *port stays 0 where the host does not have this family.
Socket Listen(int family, int backlog, int32_t* port) {
  Socket listening(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (listening.get() < 0) return Socket();
  int yes = 1;
  if (family == AF_INET6) setsockopt(listening.get(), IPPROTO_IPV6, IPV6_V6ONLY, &yes, sizeof(yes));
  sockaddr_storage any;
  Address unspecified;
  unspecified.family = family;
  socklen_t length = ToSockaddr(unspecified, 0, &any);
  auto* name = reinterpret_cast<sockaddr*>(&any);
  if (bind(listening.get(), name, length) != 0 || listen(listening.get(), backlog) != 0) return Socket();
  if (getsockname(listening.get(), name, &length) != 0) return Socket();
  *port = ntohs(family == AF_INET ? reinterpret_cast<sockaddr_in*>(name)->sin_port
                                  : reinterpret_cast<sockaddr_in6*>(name)->sin6_port);
  return listening;
}

// A connection that is being made, from either side.
struct Attempt {
  Socket socket;
  int peer = -1;              // -1: it has not said who it is
  bool connecting = false;    // the kernel has not connected it yet
  Clock::time_point until{};  // then it is given up
  size_t got = 0;             // of what the other side says first
  char bytes[sizeof(Hello)] = {};
};

class Connector {
 public:
  Connector(int rank, const std::vector<Card>& cards, bool inside_too, std::vector<Socket>* connected)
      : rank_(rank), cards_(cards), inside_too_(inside_too), connected_(connected), next_(cards.size()) {}

  // Connects with the peers of lower rank and is called by the others, until all pairs are connected or given up.
  void Run(const std::vector<int>& peers, const Socket& v4, const Socket& v6) {
    const Clock::time_point end = Clock::now() + kAltogether;
    missing_ = peers.size();
    for (int peer : peers) {
      if (peer < rank_) CallNext(peer);
    }
    while (missing_ > 0 && Clock::now() < end) {
      std::vector<pollfd> polled;
      for (const Socket* listening : {&v4, &v6}) polled.push_back({listening->get(), POLLIN, 0});
      for (const Attempt& attempt : attempts_) {
        polled.push_back({attempt.socket.get(), static_cast<int16_t>(attempt.connecting ? POLLOUT : POLLIN), 0});
      }
      if (poll(polled.data(), polled.size(), 20) < 0 && errno != EINTR) return;
      std::vector<Attempt> attempts = std::move(attempts_);
      attempts_.clear();
      for (size_t i = 0; i < attempts.size(); ++i) {
        bool goes_on = polled[i + 2].revents == 0 ? Clock::now() < attempts[i].until : MoveOn(&attempts[i]);
        if (goes_on) {
          attempts_.push_back(std::move(attempts[i]));
        } else if (attempts[i].peer >= 0 && attempts[i].peer < rank_ && IsMissing(attempts[i].peer)) {
          CallNext(attempts[i].peer);
        }
      }
      if (polled[0].revents != 0) Accept(v4);
      if (polled[1].revents != 0) Accept(v6);
    }
  }

 private:
  bool IsMissing(int peer) const { return (*connected_)[static_cast<size_t>(peer)].get() < 0; }

  // Calls the peer at its next address; after the last one the pair is given up.
  void CallNext(int peer) {
    const Card& card = cards_[static_cast<size_t>(peer)];
    std::vector<Address> addresses = Candidates(cards_[static_cast<size_t>(rank_)], card, inside_too_);
    for (size_t& next = next_[static_cast<size_t>(peer)]; next < addresses.size();) {
      const Address& address = addresses[next++];
      int port = address.family == AF_INET ? card.port_v4 : card.port_v6;
      if (port == 0) continue;
      Attempt attempt;
      attempt.socket = Socket(socket(address.family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
      sockaddr_storage to;
      socklen_t length = ToSockaddr(address, port, &to);
      int code = connect(attempt.socket.get(), reinterpret_cast<sockaddr*>(&to), length);
      if (code != 0 && errno != EINPROGRESS) continue;
      attempt.peer = peer;
      attempt.connecting = true;
      attempt.until = Clock::now() + kAttempt;
      attempts_.push_back(std::move(attempt));
      return;
    }
    --missing_;
  }

  void Accept(const Socket& listening) {
    while (true) {
      Attempt attempt;
      attempt.socket = Socket(accept4(listening.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (attempt.socket.get() < 0) return;
      attempt.until = Clock::now() + kAttempt;
      attempts_.push_back(std::move(attempt));
    }
  }

  // False where the attempt has ended, well or not.
  bool MoveOn(Attempt* attempt) {
    if (attempt->connecting) {
      int error = 0;
      socklen_t length = sizeof(error);
      if (getsockopt(attempt->socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) return false;
      attempt->connecting = false;
      Hello hello{cards_[static_cast<size_t>(attempt->peer)].token, rank_, attempt->peer};
      return Say(*attempt, &hello, sizeof(hello));
    }
    const bool calls = attempt->peer >= 0;
    const size_t whole = calls ? sizeof(Token) : sizeof(Hello);
    ssize_t got = recv(attempt->socket.get(), attempt->bytes + attempt->got, whole - attempt->got, 0);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) return false;
    attempt->got += static_cast<size_t>(got);
    if (attempt->got < whole) return true;
    const Token& own = cards_[static_cast<size_t>(rank_)].token;
    Hello hello;
    std::memcpy(&hello, attempt->bytes, whole);
    if (hello.token != own) return false;
    if (!calls) {
      bool expected = hello.to == rank_ && hello.from > rank_ && hello.from < static_cast<int>(cards_.size());
      if (!expected) return false;
      attempt->peer = hello.from;
      if (!Say(*attempt, &cards_[static_cast<size_t>(hello.from)].token, sizeof(Token))) return false;
    }
    Socket& place = (*connected_)[static_cast<size_t>(attempt->peer)];
    if (place.get() < 0) --missing_;
    place = std::move(attempt->socket);  // a second call comes where the first one's answer was late
    return false;
  }

  // The first bytes on a connection always fit into its buffer.
  static bool Say(const Attempt& attempt, const void* bytes, size_t nbytes) {
    return send(attempt.socket.get(), bytes, nbytes, MSG_NOSIGNAL) == static_cast<ssize_t>(nbytes);
  }

  const int rank_;
  const std::vector<Card>& cards_;
  const bool inside_too_;
  std::vector<Socket>* const connected_;
  std::vector<size_t> next_;  // of each peer's addresses
  std::vector<Attempt> attempts_;
  size_t missing_ = 0;
};

}  // namespace

Status ConnectTcpPeers(Transport* between, const TcpOptions& options, std::vector<int>* sockets) {
  const int rank = between->rank(), size = between->size();
  sockets->assign(static_cast<size_t>(size), -1);
  const std::vector<int> others = OtherRanks(*between);
  Card mine;
  mine.host = HostIdentity();
  if (getrandom(mine.token.data(), sizeof(mine.token), 0) != static_cast<ssize_t>(sizeof(mine.token))) {
    return Internal(std::string("getrandom: ") + std::strerror(errno));
  }
  if (options.use == TcpOptions::kNever) mine.layout = 0;
  std::vector<Address> addresses = FindAddresses(options.interfaces, options.inside_too);
  mine.addresses = static_cast<int32_t>(addresses.size());
  std::copy(addresses.begin(), addresses.end(), mine.address);
  Socket v4 = Listen(AF_INET, size, &mine.port_v4), v6 = Listen(AF_INET6, size, &mine.port_v6);

  std::vector<Card> cards(static_cast<size_t>(size));
  HVD_EXT_RETURN_IF_ERROR(Swap(between, others, std::vector<Card>(static_cast<size_t>(size), mine), &cards));
  cards[static_cast<size_t>(rank)] = mine;
  std::vector<int> peers;
  for (int other : others) {
    const Card& card = cards[static_cast<size_t>(other)];
    const bool apart = options.inside_too || card.host != mine.host;
    if (apart && card.layout == kLayout && mine.layout == kLayout) peers.push_back(other);
  }
  std::vector<Socket> connected(static_cast<size_t>(size));
  Connector(rank, cards, options.inside_too, &connected).Run(peers, v4, v6);

  std::vector<int64_t> works(static_cast<size_t>(size), 0), works_there(works);
  for (int peer : peers) works[static_cast<size_t>(peer)] = connected[static_cast<size_t>(peer)].get() >= 0;
  HVD_EXT_RETURN_IF_ERROR(Swap(between, peers, works, &works_there));
  for (int peer : peers) {
    const size_t at = static_cast<size_t>(peer);
    if (!works[at] || !works_there[at]) continue;
    int yes = 1;
    setsockopt(connected[at].get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    const std::string& congestion = options.congestion;
    if (!congestion.empty()) {
      setsockopt(connected[at].get(), IPPROTO_TCP, TCP_CONGESTION, congestion.data(),
                 static_cast<socklen_t>(congestion.size()));
    }
    (*sockets)[at] = connected[at].Release();
  }
  return Status::Ok();
}

}  // namespace hvd_ext
