// What a shard answers to GET, PUT and DROP, whichever way they come.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "directory/shard.h"
#include "directory/touch_budget.h"
#include "net/wire.h"
#include "page/promoter.h"

namespace p2pkv {

// Seconds: no call takes longer, so no reader can need its pages for longer (p2pkv/config.py, `deadline`).
constexpr double kLongestLease = 3600;
// Seconds that a lease lasts at most where nobody notices the end of whoever has it, as over ZMQ.
constexpr double kLongestUnwatchedLease = 60;

// Who asks for promotions: a number of the connection, and the lease it may have at most.
struct Asker {
  double longest_lease;
  uint64_t id;
};

bool is_directory_request(wire::Kind kind);

// The whole reply, header included, of the node that runs under `boot`. `body` is what follows the header.
std::string answer_directory_request(Shard& shard, const wire::Header& header, wire::Reader body,
                                     uint64_t boot);

// The reply to a request for which that takes time: hands it to `promoter`, which may be null, and calls
// `reply` with the whole message, perhaps later and on another thread.
void answer_promotion(Promoter* promoter, const wire::Header& header, wire::Reader body, uint64_t boot,
                      Asker asker, std::function<void(std::string)> reply);

// The reply to a TOUCH: hands its keys to `touch`, which may be null, as far as the budget goes. Adds how
// many pages were there to `n_touched`.
std::string answer_touches(const Touch& touch, TouchBudget* budget, const wire::Header& header,
                           wire::Reader body, uint64_t boot, uint64_t* n_touched);

// Hands on a RELEASE, which has no reply. False if it is none.
bool take_release(Promoter* promoter, const wire::Header& header, wire::Reader body, uint64_t boot);

}  // namespace p2pkv
