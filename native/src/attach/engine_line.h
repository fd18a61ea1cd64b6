// The engine's end of a line: writes a request, waits for the answer, and takes the request back at its
// deadline.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "attach/frames.h"
#include "attach/waiting.h"
#include "base/clock.h"
#include "base/fd.h"
#include "page/region.h"

namespace p2pkv::attaching {

// A connection to a node's socket. Nothing, with the reason in `error`, where nobody listens there.
UniqueFd knock(const std::string& path, std::string* error);
// Shows a Hello and takes the Welcome, with what came along. False, with the reason in `error`.
bool greet(int connection, const Hello& hello, int brought, const Deadline& deadline, Welcome* welcome,
           UniqueFd* given, std::string* error);

// Used by one thread at a time, but for `interrupt`.
class EngineLine {
 public:
  enum class Asked { kAnswered, kLate, kLost };

  // Null, with the reason in `error`. `engine`: what its own Welcome said.
  static std::unique_ptr<EngineLine> open(const std::string& path, const Welcome& engine,
                                          const Deadline& deadline, std::string* error);

  // Is to be written to before `ask`, all but its id and the word.
  RequestArea& request() { return *reinterpret_cast<RequestArea*>(request_->base()); }
  // Is to be read after `ask` has said kAnswered, and before the next one.
  const AnswerArea& answer() const { return *reinterpret_cast<const AnswerArea*>(answer_->base()); }

  // When it returns the node does not look at the memory that the request names any more, or will not store
  // what it has seen there. kLost: there is nobody at the other end, and the line is of no use any more.
  Asked ask(const Deadline& deadline);

  // Has the node be awake by the time of the next `ask`, if that is made soon.
  void call_ahead();

  // Has who waits, or asks from now on, be told kLost.
  void interrupt();

  // The memory that pages are put into which can't be shared themselves; made, or made larger, when it is
  // needed. Null where it is not to be had.
  std::shared_ptr<SharedRegion> staging;
  uint32_t staging_number = 0;

 private:
  EngineLine() = default;
  Asked wait_for_answer(uint64_t id, const Deadline& deadline);

  UniqueFd connection_;
  std::unique_ptr<SharedRegion> request_;
  std::unique_ptr<ReadOnlyMapping> answer_;
  std::optional<Waiting> waiting_;
  uint64_t last_id_ = 0;
  std::atomic<bool> is_interrupted_{false};
};

}  // namespace p2pkv::attaching
