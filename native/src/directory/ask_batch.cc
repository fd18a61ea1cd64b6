#include "directory/ask_batch.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "directory/location_columns.h"
#include "directory/other_holders.h"
#include "net/wire.h"

namespace p2pkv {

AskBatch::AskBatch(std::shared_ptr<const RingTable> ring, size_t n)
    : ring_(std::move(ring)),
      latest_ask_of_(ring_->is_healthy.size(), -1),
      is_owner_(ring_->is_healthy.size()),
      rows_(n),
      answered_(n) {}

AskBatch::AskBatch(const Key* keys, size_t n, const uint8_t* is_done, std::shared_ptr<const RingTable> ring,
                   Order order)
    : AskBatch(std::move(ring), n) {
  ask_owners(keys, is_done, order);
}

AskBatch::AskBatch(const int32_t* members, size_t n, std::shared_ptr<const RingTable> ring)
    : AskBatch(std::move(ring), n) {
  for (uint32_t row = 0; row < n; ++row) {
    if (members[row] >= 0) assign(row, members[row]);
    count(row);
  }
}

std::unique_ptr<AskBatch> AskBatch::of_doubted(const Key* keys) const {
  if (n_doubted_ == 0) return nullptr;
  std::vector<uint8_t> is_done(rows_.size());
  for (uint32_t row = 0; row < rows_.size(); ++row) {
    is_done[row] = rows_[row].is_left_out || rows_[row].is_done || answered_[row] != 0 ? 1 : 0;
  }
  std::unique_ptr<AskBatch> again(new AskBatch(ring_, rows_.size()));
  again->refused_before_ = has_refused_;
  again->ask_owners(keys, is_done.data(), Order::kDoubted);
  return again;
}

void AskBatch::ask_owners(const Key* keys, const uint8_t* is_done, Order order) {
  if (ring_->points.empty()) return;
  for (uint32_t row = 0; row < rows_.size(); ++row) {
    rows_[row].is_left_out = is_done != nullptr && is_done[row] != 0;
    if (rows_[row].is_left_out) continue;
    const int32_t* owners = ring_->owners_of(keys[row]);
    rows_[row].owners = owners;
    rows_[row].next = order == Order::kInTurn ? 0 : static_cast<uint32_t>(ring_->replicas);
    for (size_t i = 0; i < ring_->replicas && owners[i] >= 0; ++i) {
      const bool is_asked = expect(row, owners[i], order);
      if (is_asked && order != Order::kInTurn) place(row, owners[i]);
      if (!is_asked && order == Order::kInTurn && owners[i] != ring_->own_index) rows_[row].is_doubted = true;
    }
    ask_next(row);
    count(row);
  }
}

void AskBatch::add(const int32_t* members) {
  n_open_ = 0;
  n_unheard_ = 0;
  n_doubted_ = 0;
  for (uint32_t row = 0; row < rows_.size(); ++row) {
    const int32_t* owners = rows_[row].owners;
    const bool is_asked = owners != nullptr && std::find(owners, owners + ring_->replicas, members[row]) !=
                                                   owners + ring_->replicas;
    if (members[row] >= 0 && !is_asked) assign(row, members[row]);
    count(row);
  }
}

void AskBatch::count(uint32_t row) {
  n_open_ += is_open(row) ? 1 : 0;
  n_unheard_ += is_unheard(row) ? 1 : 0;
  n_doubted_ += is_in_doubt(row) ? 1 : 0;
}

void AskBatch::assign(uint32_t row, int32_t owner) {
  if (expect(row, owner, Order::kTogether)) place(row, owner);
}

bool AskBatch::expect(uint32_t row, int32_t owner, Order order) {
  if (owner == ring_->own_index) {
    answered_[row] = 1;
    rows_[row].is_heard = true;
    return false;
  }
  const auto member = static_cast<size_t>(owner);
  if (order != Order::kDoubted && ring_->is_healthy[member] == 0) {
    if (std::find(passed_over_.begin(), passed_over_.end(), owner) == passed_over_.end()) {
      passed_over_.push_back(owner);
    }
    return false;
  }
  if (is_owner_[member] == 0) {
    is_owner_[member] = 1;
    owners_.push_back(owner);
  }
  ++rows_[row].waiting;
  rows_[row].trusted += is_trusted(owner) ? 1 : 0;
  return true;
}

void AskBatch::place(uint32_t row, int32_t owner) {
  int& latest = latest_ask_of_[static_cast<size_t>(owner)];
  const auto at = static_cast<size_t>(latest);
  if (latest < 0 || at < n_sealed_ || asks_[at].rows.size() >= kMaxRows) {
    latest = static_cast<int>(asks_.size());
    asks_.push_back({owner, {}});
  }
  asks_[static_cast<size_t>(latest)].rows.push_back(row);
}

void AskBatch::ask_next(uint32_t row) {
  Row& asked = rows_[row];
  if (asked.owners == nullptr || !is_open(row)) return;
  while (asked.next < ring_->replicas && asked.owners[asked.next] >= 0) {
    const int32_t owner = asked.owners[asked.next++];
    if (is_peer(owner)) return place(row, owner);
  }
}

size_t AskBatch::seal() {
  return std::exchange(n_sealed_, asks_.size());
}

void AskBatch::hurry(size_t ask) {
  if (std::exchange(asks_.at(ask).is_hurried, true)) return;
  for (const uint32_t row : asks_[ask].rows) ask_next(row);
}

void AskBatch::ask_together(int32_t member) {
  for (uint32_t row = 0; row < rows_.size(); ++row) {
    const Row& asked = rows_[row];
    if (asked.owners == nullptr) continue;
    const int32_t* end = asked.owners + ring_->replicas;
    if (std::find(asked.owners, end, member) == end) continue;
    for (size_t i = 0; i < ring_->replicas; ++i) ask_next(row);
  }
}

std::string AskBatch::body(size_t ask, const uint8_t* records, size_t record_size) const {
  const std::vector<uint32_t>& rows = asks_.at(ask).rows;
  std::string body(rows.size() * record_size, '\0');
  for (size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(body.data() + i * record_size, records + rows[i] * record_size, record_size);
  }
  return body;
}

void AskBatch::update(uint32_t row, int32_t owner, bool has_answered, bool is_done) {
  const bool was_open = is_open(row), was_unheard = is_unheard(row), was_in_doubt = is_in_doubt(row);
  --rows_[row].waiting;
  if (has_answered) answered_[row] = 1;
  if (is_trusted(owner)) {
    --rows_[row].trusted;
    if (has_answered) rows_[row].is_heard = true;
  }
  if (is_done) rows_[row].is_done = true;
  n_open_ -= was_open && !is_open(row) ? 1 : 0;
  n_unheard_ -= was_unheard && !is_unheard(row) ? 1 : 0;
  n_doubted_ -= was_in_doubt && !is_in_doubt(row) ? 1 : 0;
  ask_next(row);
}

void AskBatch::acknowledge(size_t ask) {
  asks_.at(ask).is_answered = true;
  for (const uint32_t row : asks_[ask].rows) update(row, asks_[ask].owner, true, false);
}

void AskBatch::refuse(size_t ask) {
  const int32_t owner = asks_.at(ask).owner;
  has_refused_.resize(ring_->is_healthy.size());
  has_refused_[static_cast<size_t>(owner)] = 1;
  for (const uint32_t row : asks_[ask].rows) update(row, owner, false, false);
}

std::optional<size_t> AskBatch::count_found(std::string_view reply, size_t n_rows) {
  if (reply.size() < n_rows) return std::nullopt;
  return n_rows - static_cast<size_t>(std::count(reply.begin(), reply.begin() + n_rows, '\0'));
}

bool AskBatch::take_found(size_t ask, std::string_view reply, uint8_t* found, Location* locations) {
  const size_t n_rows = asks_.at(ask).rows.size();
  const auto n_found = count_found(reply, n_rows);
  if (!n_found || reply.size() != n_rows + *n_found * sizeof(Location)) {
    refuse(ask);
    return false;
  }
  take(ask, reply.substr(0, n_rows), reply.data() + n_rows, found, locations);
  return true;
}

bool AskBatch::take_located(size_t ask, std::string_view reply, uint8_t* found, Location* locations,
                            std::vector<RowHolders>* others) {
  const std::vector<uint32_t>& rows = asks_.at(ask).rows;
  const auto n_named = count_named(reply, rows.size());
  std::vector<Location> taken;
  if (!n_named || !take_columns(reply.substr(rows.size()), *n_named, &taken)) {
    refuse(ask);
    return false;
  }
  const std::string_view named = reply.substr(0, rows.size());
  if (std::any_of(named.begin(), named.end(), [](char n) { return n > 1; })) {
    taken = take_first(rows, named, taken, others);
  }
  take(ask, named, reinterpret_cast<const char*>(taken.data()), found, locations);
  return true;
}

std::optional<size_t> AskBatch::count_named(std::string_view reply, size_t n_rows) {
  if (reply.size() < n_rows) return std::nullopt;
  size_t n_named = 0;
  for (const char n : reply.substr(0, n_rows)) {
    if (static_cast<uint8_t>(n) > kMostHolders) return std::nullopt;
    n_named += static_cast<uint8_t>(n);
  }
  return n_named;
}

std::vector<Location> AskBatch::take_first(const std::vector<uint32_t>& rows, std::string_view named,
                                           const std::vector<Location>& all,
                                           std::vector<RowHolders>* others) {
  std::vector<Location> first;
  auto next = all.begin();
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto end = next + static_cast<uint8_t>(named[i]);
    if (next != end) first.push_back(*next);
    if (end - next > 1 && others != nullptr) others->push_back({rows[i], {next + 1, end}});
    next = end;
  }
  return first;
}

void AskBatch::take(size_t ask, std::string_view is_found, const char* next, uint8_t* found,
                    Location* locations) {
  asks_[ask].is_answered = true;
  const std::vector<uint32_t>& rows = asks_[ask].rows;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (is_found[i] != 0) {
      found[rows[i]] = 1;
      std::memcpy(static_cast<void*>(locations + rows[i]), next, sizeof(Location));
      next += sizeof(Location);
    }
    update(rows[i], asks_[ask].owner, true, is_found[i] != 0);
  }
}

bool AskBatch::take_flags(size_t ask, std::string_view reply, uint8_t* flags) {
  const std::vector<uint32_t>& rows = asks_.at(ask).rows;
  if (reply.size() != rows.size()) {
    refuse(ask);
    return false;
  }
  asks_[ask].is_answered = true;
  for (size_t i = 0; i < rows.size(); ++i) {
    flags[rows[i]] = reply[i] != 0 ? 1 : 0;
    update(rows[i], asks_[ask].owner, true, false);
  }
  return true;
}

std::vector<uint8_t> AskBatch::waiting() const {
  std::vector<uint8_t> waiting;
  waiting.reserve(rows_.size());
  for (const Row& row : rows_) waiting.push_back(row.waiting > 0 ? 1 : 0);
  return waiting;
}

std::vector<int32_t> AskBatch::silent() const {
  std::vector<int32_t> members;
  for (const Ask& ask : asks_) {
    if (!ask.is_answered && !ask.is_excused) members.push_back(ask.owner);
  }
  return members;
}

}  // namespace p2pkv
