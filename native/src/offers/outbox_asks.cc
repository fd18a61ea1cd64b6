// Who asks an Outbox for rows, and what each asker is told.
#include <algorithm>
#include <utility>

#include "offers/outbox_parts.h"

namespace p2pkv::offers {

bool Outbox::is_wanted(const Ask& ask, const Outgoing& offer) {
  const bool is_for_it = offer.to == 0 || offer.to == ask.link->node_key();
  return is_for_it && ask.request == offer.request && ask.first_row < offer.first_row + offer.n_rows() &&
         offer.first_row < ask.first_row + ask.n_rows;
}

bool Outbox::is_asked_for(const Outgoing& offer) const {
  return std::any_of(asks_.begin(), asks_.end(), [&offer](const Ask& ask) { return is_wanted(ask, offer); });
}

// Whether who is at the other end reads it where it lies, on its device.
bool Outbox::takes_directly(const Outgoing& offer, Link& link) const {
  const bool has_refused = std::any_of(offer.staged_for.begin(), offer.staged_for.end(),
                                       [&link](const auto& one) { return one.lock().get() == &link; });
  for (size_t way = 0; way < ways_.size() && !has_refused; ++way) {
    const auto& memories = offer.placed.memories;
    const bool leads_to_all = std::all_of(memories.begin(), memories.end(), [way](const auto& memory) {
      return !memory->descriptions[way].empty();
    });
    if (!ways_[way].empty() && leads_to_all && link.reads_directly(ways_[way])) return true;
  }
  return false;
}

// Those who ask for it; else, if it is put, the node that it is put to.
void Outbox::tell(Outgoing& offer, std::vector<Post>* posts) {
  for (const Ask& ask : asks_) {
    if (is_wanted(ask, offer)) tell_one(offer, ask.link, ask.id, posts);
  }
  const auto link = offer.link.lock();
  if (link && offer.told.empty()) tell_one(offer, link, 0, posts);
}

void Outbox::tell_one(Outgoing& offer, const std::shared_ptr<Link>& link, uint64_t ask,
                      std::vector<Post>* posts) {
  const bool is_direct = offer.lies_on_device() && takes_directly(offer, *link);
  const bool is_copied = offer.stowed || (offer.device && !is_direct);
  if (is_copied && !offer.stowed && !offer.staged && !offer.is_done) return queue_staging(live_.at(offer.id));
  std::string body;
  body.reserve(sizeof(OfferRecord) + offer.request.size() + offer.n_rows() * sizeof(RowRecord));
  wire::append(body, OfferRecord{offer.id, ask, left_ms(offer.lease), offer.first_row, offer.n_rows(),
                                 static_cast<uint32_t>(offer.request.size())});
  body += offer.request;
  const uint32_t copied_to = !is_copied ? 0 : offer.stowed ? pool_->memory()->id : staging_->memory()->id;
  uint64_t copied_at = offer.stowed   ? offer.stowed->offset()
                       : offer.staged ? staging_->offset_of(offer.staged)
                                      : 0;
  for (const PlacedRows::Row& row : offer.placed.rows) {
    if (is_copied) {
      wire::append(body, RowRecord{copied_to, 0, copied_at, row.length});
      copied_at += StagingArea::padded(row.length);
    } else {
      const uint32_t flags = is_direct ? kOnDevice : 0;
      wire::append(body, RowRecord{offer.placed.memories[row.memory]->id, flags, row.offset, row.length});
    }
  }
  if (!offer.was_told(*link)) offer.told.push_back(link);
  posts->push_back({link, Kind::kOffer, std::move(body)});
}

bool Outbox::asked(const std::shared_ptr<Link>& link, wire::Reader body) {
  auto message = take_ask(body);
  if (!message) return false;
  const AskRecord& record = message->record;
  std::vector<Post> posts;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return true;
    auto share = shares_->take(link->id(), 2 * sizeof(Ask) + record.name_size);
    if (!share) {  // the asker gives up at its own deadline
      ++n_refused_asks_;
      return true;
    }
    asks_.push_back({link, record.ask, std::move(message->name), record.first_row, record.n_rows,
                     after_ms(record.timeout_ms), std::move(share)});
    const auto found = by_request_.find(asks_.back().request);
    if (found != by_request_.end()) {
      for (const auto& [key, offer] : found->second) {
        if (!is_wanted(asks_.back(), *offer)) continue;
        const bool can_be_told = offer->staged || (offer->is_ready && takes_directly(*offer, *link));
        if (offer->lies_on_device() && !can_be_told) {
          queue_staging(offer);
        } else {
          tell_one(*offer, link, record.ask, &posts);
        }
      }
    }
    refuse_gone(asks_.back(), &posts);
  }
  send(posts);
  return true;
}

// A put is over for its receiver alone, which knows; a name that is offered may be asked for by anybody.
void Outbox::remember_gone(const Outgoing& offer) {
  if (offer.to == 0) gone_.add(offer.request, {offer.first_row, offer.first_row + offer.n_rows()});
}

// Tells who asks of the rows that it would wait for in vain: those that are over, and not offered anew.
void Outbox::refuse_gone(const Ask& ask, std::vector<Post>* posts) {
  const auto gone = gone_.among(ask.request, {ask.first_row, ask.first_row + ask.n_rows});
  if (gone.empty()) return;
  std::vector<bool> is_gone(ask.n_rows + 1, false);  // the last one ends the last run
  const auto mark = [&](RowRange rows, bool value) {
    for (uint32_t row = rows.first; row < rows.end; ++row) is_gone[row - ask.first_row] = value;
  };
  for (const RowRange& rows : gone) mark(rows, true);
  if (const auto live = by_request_.find(ask.request); live != by_request_.end()) {
    for (const auto& [key, offer] : live->second) {
      if (!is_wanted(ask, *offer)) continue;
      mark({std::max(offer->first_row, ask.first_row),
            std::min(offer->first_row + offer->n_rows(), ask.first_row + ask.n_rows)},
           false);
    }
  }
  std::string body;
  uint32_t n_runs = 0;
  for (uint32_t row = 0, first = 0; row <= ask.n_rows; ++row) {
    if (is_gone[row]) continue;
    if (row > first) {
      wire::append(body, GoneRecord{ask.id, ask.first_row + first, row - first});
      ++n_runs;
    }
    first = row + 1;
  }
  if (n_runs == 0) return;
  ++n_gone_asks_;
  posts->push_back({ask.link, Kind::kGone, std::move(body), n_runs});
}

bool Outbox::ask_ended(const std::shared_ptr<Link>& link, wire::Reader body) {
  const auto id = body.value<uint64_t>();
  if (!id) return false;
  std::vector<Post> posts;
  {
    const std::lock_guard lock(mutex_);
    if (asks_.remove_if([&](const Ask& ask) { return ask.id == *id && ask.link == link; }) > 0)
      unstage_unwanted(&posts);
  }
  send(posts);
  return true;
}

bool Outbox::asked_to_stage(const std::shared_ptr<Link>& link, uint32_t count, wire::Reader body) {
  std::vector<Post> posts;
  {
    const std::lock_guard lock(mutex_);
    for (uint32_t i = 0; i < count; ++i) {
      const auto id = body.value<uint64_t>();
      if (!id) return false;
      const auto found = live_.find(*id);
      if (found == live_.end() || !found->second->lies_on_device() || !found->second->was_told(*link))
        continue;
      Outgoing& offer = *found->second;
      offer.staged_for.push_back(link);
      std::erase_if(offer.told, [&link](const auto& one) { return one.lock() == link; });
      tell(offer, &posts);
    }
  }
  send(posts);
  return true;
}

}  // namespace p2pkv::offers
