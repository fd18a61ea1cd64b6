#include "attach/engine_line.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "net/packets.h"

namespace p2pkv::attaching {
namespace {

std::string why_refused(const Welcome& welcome) {
  switch (static_cast<Refusal>(welcome.refusal)) {
    case Refusal::kVersion:
      return "the node there speaks version " + std::to_string(welcome.version) +
             " of attaching, and this p2pkv " + std::to_string(kVersion) + "; upgrade one of the two";
    case Refusal::kTooMany:
      return "the node there has let in " + std::to_string(kMostEngines) + " engines, or " +
             std::to_string(kMostLines) +
             " lines of this one, and takes no more; end an engine of this host, "
             "or leave attach out";
    case Refusal::kUnknownEngine:
      return "the node there does not know this engine any more; attach anew";
    default:
      return "the node there refuses the memory that requests are written to; its p2pkv is another one: "
             "upgrade one of "
             "the two";
  }
}

}  // namespace

UniqueFd knock(const std::string& path, std::string* error) {
  UniqueFd connection(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    *error = "the path has to be shorter than " + std::to_string(sizeof address.sun_path) + " bytes";
    return UniqueFd();
  }
  path.copy(address.sun_path, path.size());
  if (connection && connect(connection.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
    if (is_own_user(connection.get())) return connection;
    *error = "another user's process listens there; run both as one user";
    return UniqueFd();
  }
  *error = errno == ENOENT || errno == ECONNREFUSED
               ? "no node listens there; start one there (p2pkv node with attach_listen), or leave attach out"
           : errno == EAGAIN ? "the node there does not let anybody in at the moment; is it stopped?"
                             : std::strerror(errno);
  return UniqueFd();
}

bool greet(int connection, const Hello& hello, int brought, const Deadline& deadline, Welcome* welcome,
           UniqueFd* given, std::string* error) {
  *welcome = Welcome{};
  if (send_packet(connection, hello, brought)) {
    while (wait_readable(connection, deadline)) {
      const Received received = receive_packet(connection, welcome, given);
      if (received == Received::kNothing) continue;
      // That of another version may have another length, but begins alike.
      if (received == Received::kWrong && welcome->magic == kWelcomeMagic && welcome->version != kVersion)
        welcome->refusal = static_cast<uint16_t>(Refusal::kVersion);
      else if (received != Received::kPacket || welcome->magic != kWelcomeMagic) {
        *error = received == Received::kEnd ? "the node there hung up"
                                            : "who listens there is no node of p2pkv; is attach right?";
        return false;
      }
      if (welcome->refusal != 0) *error = why_refused(*welcome);
      return welcome->refusal == 0;
    }
  }
  *error = "the node there does not answer; is it stopped?";
  return false;
}

std::unique_ptr<EngineLine> EngineLine::open(const std::string& path, const Welcome& engine,
                                             const Deadline& deadline, std::string* error) {
  auto line = std::unique_ptr<EngineLine>(new EngineLine());
  line->request_ = SharedRegion::create(area_nbytes<RequestArea>(), error);
  if (!line->request_) return nullptr;
  line->connection_ = knock(path, error);
  if (!line->connection_) return nullptr;
  const Hello hello{kHelloMagic, kVersion, static_cast<uint16_t>(Purpose::kLine), engine.engine,
                    engine.secret};
  Welcome welcome;
  UniqueFd answer;
  if (!greet(line->connection_.get(), hello, line->request_->fd(), deadline, &welcome, &answer, error))
    return nullptr;
  line->answer_ = ReadOnlyMapping::map(answer.get(), area_nbytes<AnswerArea>(), error);
  if (!line->answer_) return nullptr;
  line->waiting_.emplace(line->connection_.get(), &line->request().is_awake, &line->answer().is_awake);
  return line;
}

void EngineLine::call_ahead() {
  store_word_of(request().is_awake, awake_here());
  wake(connection_.get(), answer().is_awake, last_id_);
}

EngineLine::Asked EngineLine::ask(const Deadline& deadline) {
  const uint64_t id = ++last_id_;
  store_word_of(request().id, id);
  const Asked asked = wait_for_answer(id, deadline);
  if (asked != Asked::kAnswered) {
    // From here on the node either sees this before it commits, and stores nothing, or it has said before
    // that it is committing, and does not look at the caller's memory any more. Which of the two is of no
    // account.
    store_word_of(request().withdrawn, id);
    load_word_of(answer().committing);
  }
  return asked;
}

EngineLine::Asked EngineLine::wait_for_answer(uint64_t id, const Deadline& deadline) {
  if (!wake(connection_.get(), answer().is_awake, id)) return Asked::kLost;
  const auto woken = waiting_->until([&] { return load_word_of(answer().answered) == id; }, deadline);
  if (woken == Waiting::Woken::kLate) return Asked::kLate;
  return woken == Waiting::Woken::kSeen && !is_interrupted_ ? Asked::kAnswered : Asked::kLost;
}

void EngineLine::interrupt() {
  is_interrupted_ = true;
  shutdown(connection_.get(), SHUT_RDWR);
}

}  // namespace p2pkv::attaching
