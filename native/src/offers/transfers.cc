#include "offers/transfers.h"

#include <unistd.h>

#include <atomic>
#include <mutex>
#include <set>

#include "net/sealed_door.h"
#include "offers/inbox.h"
#include "offers/link_server.h"
#include "offers/outbox.h"

namespace p2pkv {
namespace offers {
namespace {

constexpr size_t kMaxName = 64;

// Puts the parts together: what comes over links goes to the side it is for.
class LinkedTransfers final : public Transfers {
 public:
  explicit LinkedTransfers(Options options)
      : options_(std::move(options)),
        outbox_(std::make_shared<Outbox>(options_.keep_unclaimed_s, direct_ways(options_.ways))),
        inbox_(std::make_shared<Inbox>(options_)),
        links_({[this](const auto& link, const auto& header, auto body) { return heard(link, header, body); },
                [this](const auto& link) { lost(*link); },
                [this] {
                  outbox_->tick();
                  inbox_->tick();
                }}) {}
  ~LinkedTransfers() override { close(); }

  bool start(std::string* error) {
    if (!inbox_->start(error)) return false;
    if (const auto& pool = inbox_->buddy_pool()) {
      RowMemory memory = *pool->memory();
      memory.is_writable = false;  // by grants of the caller's
      pool->set_memory(memories_.at(memories_.add(std::move(memory))));
      outbox_->start_stowing(pool);
    }
    return links_.start(options_.listen, error);
  }

  std::string accept(std::string_view remote, std::string* error) override {
    return links_.accept(remote, error);
  }

  void announce(uint64_t node_key, uint64_t boot) override {
    node_key_ = node_key;
    boot_ = boot;
  }

  uint32_t add_memory(uint64_t address, uint64_t nbytes, bool is_writable,
                      std::vector<std::shared_ptr<MemoryRegion>> regions,
                      std::vector<std::string> descriptions) override {
    return memories_.add({0, address, nbytes, is_writable, std::move(regions), std::move(descriptions)});
  }

  uint32_t add_device_memory(uint64_t address, uint64_t nbytes, bool is_readable, bool is_writable,
                             std::shared_ptr<cuda::Device> device, std::vector<Refusal>* refusals,
                             std::string* error) override {
    if (!start_staging(device, is_readable, error)) return 0;
    RowMemory memory{0, address, nbytes, is_writable, {}, {}, std::move(device), is_readable};
    register_directly(&memory, refusals);
    if (is_writable && memory.takes_directly()) say_what_is_direct();
    return memories_.add(std::move(memory));
  }

  std::string device_failure() override {
    const std::string failure = outbox_->device_failure();
    const auto landing = inbox_->landing_of_devices();
    return failure.empty() && landing ? landing->failure() : failure;
  }

  void remove_memory(uint32_t id) override {
    const auto memory = memories_.remove(id);
    outbox_->withdraw_memory(id);
    inbox_->revoke_memory(id);
    if (!memory || !memory->device) return;  // regions of host memory are the caller's
    for (const auto& region : memory->regions) {
      if (region) region->close();
    }
  }

  bool connect(uint64_t node_key, uint64_t boot, std::string_view door, double timeout,
               std::string* error) override {
    if (is_connected(node_key)) return true;  // it was quicker
    const auto link =
        links_.connect(door, {node_key_, boot_}, {node_key, boot}, Deadline::after(timeout), error);
    if (link) say_what_is_direct_to(*link);
    return link != nullptr;
  }

  bool is_connected(uint64_t node_key) override { return links_.find(node_key) != nullptr; }

  void forget(PeerId peer, double after) override { links_.hang_up_after(peer, after); }

  void keep(PeerId peer) override { links_.keep(peer); }

  std::shared_ptr<Offer> offer(std::optional<uint64_t> to, Rows rows, const Deadline& lease,
                               std::string* error) override {
    auto placed = place(rows, true, error);
    if (!placed) return nullptr;
    const auto link = to ? links_.find(*to) : nullptr;
    return outbox_->offer(to.value_or(0), link, std::move(rows), std::move(*placed), lease, error);
  }

  std::shared_ptr<Grant> grant(std::optional<uint64_t> from, Rows rows, const Deadline& deadline,
                               std::string* error) override {
    auto placed = place(rows, false, error);
    if (!placed) return nullptr;
    if (!from) return inbox_->grant(std::move(rows), std::move(*placed), deadline, error);
    return inbox_->get(links_.find(*from), std::move(rows), std::move(*placed), deadline);
  }

  int64_t find_unregistered(const std::vector<RowSpan>& spans, bool for_reading) override {
    int64_t bad_row;
    memories_.place(spans, for_reading, &bad_row);
    return bad_row;
  }

  std::vector<Reading> readings() override {
    auto readings = outbox_->readings();
    const auto received = inbox_->readings();
    readings.insert(readings.end(), received.begin(), received.end());
    readings.emplace_back("p2pkv_transfer_links", links_.n_links());
    return readings;
  }

  void close() override {
    if (getpid() != pid_) return;  // a forked child has none of the threads to wait for
    const std::lock_guard closing(closing_);
    outbox_->close();
    inbox_->close();
    links_.close();
  }

 private:
  std::optional<PlacedRows> place(const Rows& rows, bool for_reading, std::string* error) {
    int64_t bad_row;
    auto placed = memories_.place(rows.spans, for_reading, &bad_row);
    if (bad_row < 0) return placed;
    *error = "row " + std::to_string(bad_row) + " lies in no registered memory";
    return std::nullopt;
  }

  // Made with the first device memory, so that nobody else pays for it; what rows are offered from only with
  // the first that may be offered.
  bool start_staging(const std::shared_ptr<cuda::Device>& device, bool is_readable, std::string* error) {
    const std::lock_guard lock(staging_);
    if (!inbox_->landing_of_devices()) {
      auto incoming = StagingArea::create(device, options_.staging_nbytes, false, options_.ways, error);
      if (!incoming || !inbox_->start_landing(std::make_shared<Landing>(incoming), device, error))
        return false;
    }
    if (!is_readable || has_outgoing_) return true;
    const auto outgoing = StagingArea::create(device, options_.staging_nbytes, true, options_.ways, error);
    if (!outgoing) return false;
    // Peers are told its id, and ask how it can be read.
    outgoing->set_memory(memories_.at(memories_.add(*outgoing->memory())));
    has_outgoing_ = outbox_->start_staging(outgoing);
    if (!has_outgoing_) *error = "cannot start a thread to stage device memory";
    return has_outgoing_;
  }

  // As they are compared with those of peers; empty those that know host memory alone.
  static std::vector<std::string> direct_ways(const std::vector<Way>& ways) {
    std::vector<std::string> texts;
    for (const Way& way : ways)
      texts.push_back(way.transport->reads_devices() ? way_text(way.name, way.transport->domain()) : "");
    return texts;
  }

  // Makes a device's memory known to the ways that read devices. What they can't let peers read may still be
  // read into.
  void register_directly(RowMemory* memory, std::vector<Refusal>* refusals) const {
    auto* const base = reinterpret_cast<uint8_t*>(memory->address);
    for (const Way& way : options_.ways) {
      std::shared_ptr<MemoryRegion> region;
      if (way.transport->reads_devices()) {
        std::string why;
        region = way.transport->register_memory(base, memory->nbytes, -1, memory->is_offerable, &why);
        if (!region) refusals->push_back({way.name, why});
        if (!region && memory->is_offerable && memory->is_writable) {
          std::string ignored;
          region = way.transport->register_memory(base, memory->nbytes, -1, false, &ignored);
        }
      }
      memory->descriptions.push_back(region ? region->describe() : std::string());
      memory->regions.push_back(memory->is_writable || !memory->descriptions.back().empty() ? region
                                                                                            : nullptr);
    }
  }

  // Peers tell rows on devices as such to who has said that it reads them.
  void say_what_is_direct() {
    is_direct_ = true;
    for (const auto& link : links_.all()) say_what_is_direct_to(*link);
  }

  void say_what_is_direct_to(Link& link) const {
    if (!is_direct_) return;
    std::string ways;
    uint32_t n = 0;
    for (const Way& way : options_.ways) {
      if (!way.transport->reads_devices()) continue;
      append_text(ways, way.name);
      append_text(ways, way.transport->domain());
      ++n;
    }
    std::string body;
    wire::append(body, n);
    link.post(Kind::kDirect, 0, 1, body + ways);
  }

  bool told_what_is_direct(Link& link, wire::Reader body) const {
    const auto ways = take_direct(body);
    if (!ways) return false;
    std::set<std::string> texts;
    for (const WayMessage& way : *ways) texts.insert(way_text(way.name, way.domain));
    link.set_direct(std::move(texts));
    return true;
  }

  void lost(const Link& link) {
    outbox_->lost(link);
    inbox_->lost(link);
  }

  bool heard(const std::shared_ptr<Link>& link, const wire::Header& header, wire::Reader body) {
    if ((header.kind & static_cast<uint16_t>(wire::Kind::kReply)) != 0) {
      inbox_->replied(*link, header, body);
      return true;
    }
    const auto kind = static_cast<Kind>(header.kind);
    // Nobody is served before it has said who it is.
    if (link->node_key() == 0 && kind != Kind::kIntroduce) return false;
    switch (kind) {
      case Kind::kIntroduce:
        return introduced(link, header, body);
      case Kind::kReach:
        return reach(link, header, body);
      case Kind::kJoin:
        return join(link, header, body);
      case Kind::kOffer:
        return inbox_->offered(link, header.count, body);
      case Kind::kAsk:
        return outbox_->asked(link, body);
      case Kind::kAskEnd:
        return outbox_->ask_ended(link, body);
      case Kind::kPulled:
        return outbox_->pulled(link, header.count, body);
      case Kind::kSettled:
        return inbox_->settled(*link, header.count, body);
      case Kind::kWithdrawn:
        return inbox_->withdrawn(*link, body);
      case Kind::kGone:
        return inbox_->gone(*link, header.count, body);
      case Kind::kDirect:
        return told_what_is_direct(*link, body);
      case Kind::kStage:
        return outbox_->asked_to_stage(link, header.count, body);
    }
    return link->reply(header, wire::ReplyStatus::kMalformed, {});  // a later version's; it may do without
  }

  bool introduced(const std::shared_ptr<Link>& link, const wire::Header& header, wire::Reader body) {
    const auto record = body.value<IntroduceRecord>();
    // Once, and only by who opened the link: this node knows whom it has connected to.
    if (!record || record->node_key == 0 || node_key_ == 0 || link->node_key() != 0) return false;
    link->introduce({record->node_key, record->boot});
    if (!link->reply(header, wire::ReplyStatus::kOk, {})) return false;
    say_what_is_direct_to(*link);
    return true;
  }

  // Says over what a registered memory can be read.
  bool reach(const std::shared_ptr<Link>& link, const wire::Header& header, wire::Reader body) {
    const auto source = body.value<uint32_t>();
    if (!source) return false;
    const auto memory = memories_.at(*source);
    std::string ways;
    uint32_t n = 0;
    for (size_t i = 0; memory && i < options_.ways.size(); ++i) {
      if (memory->descriptions[i].empty()) continue;
      append_text(ways, options_.ways[i].name);
      append_text(ways, options_.ways[i].transport->domain());
      append_text(ways, memory->descriptions[i]);
      ++n;
    }
    std::string answer;
    wire::append(answer, n);
    link->reply(header, wire::ReplyStatus::kOk, answer + ways);
    return true;
  }

  // Lets a reader in, as the control loop does for CONNECT.
  bool join(const std::shared_ptr<Link>& link, const wire::Header& header, wire::Reader body) {
    const auto name = take_text(body, kMaxName);
    if (!name) return false;
    std::string error = "this transport is not served here";
    std::string half;
    for (const Way& way : options_.ways) {
      if (way.name == *name) half = way.transport->accept(body.rest(), &error);
    }
    if (half.empty()) {
      link->reply(header, wire::ReplyStatus::kRefused, error);
    } else {
      link->reply(header, wire::ReplyStatus::kOk, half);
    }
    return true;
  }

  const Options options_;
  std::atomic<uint64_t> node_key_{0};
  std::atomic<uint64_t> boot_{0};
  const pid_t pid_ = getpid();
  std::mutex closing_;  // held by the one close() that does the work, so that the others return after it
  std::mutex staging_;  // held while it is made
  bool has_outgoing_ = false;
  std::atomic<bool> is_direct_ = false;  // device memory may be read into over some way
  RowMemories memories_;
  const std::shared_ptr<Outbox> outbox_;
  const std::shared_ptr<Inbox> inbox_;
  LinkServer links_;  // last: its thread calls the others
};

}  // namespace
}  // namespace offers

std::string Transfers::request() {
  return ask_for_door(kLinkDoor);
}

std::shared_ptr<Transfers> Transfers::start(Options options, std::string* error) {
  const std::shared_ptr<offers::LinkedTransfers> transfers(new offers::LinkedTransfers(std::move(options)),
                                                           DeleteUnlessForked<offers::LinkedTransfers>{});
  return transfers->start(error) ? transfers : nullptr;
}

}  // namespace p2pkv
