// Where bodies and events end, however they are cut.
#include <algorithm>
#include <random>
#include <string>
#include <string_view>

#include "check.h"
#include "relay/answer_body.h"
#include "relay/event_stream.h"
#include "seed.h"

namespace {

using p2pkv::AnswerBody;
using p2pkv::EventStream;

// Feeds `raw` in pieces of one to `most` bytes.
template <typename T>
bool feed(T& to, std::string_view raw, std::string& out, size_t most, std::mt19937_64& chance) {
  while (!raw.empty()) {
    const size_t n = std::min<size_t>(raw.size(), 1 + chance() % most);
    if (!to.feed(raw.substr(0, n), out)) return false;
    raw.remove_prefix(n);
  }
  return true;
}

TEST(relay_finds_the_end_of_a_body_however_it_is_cut) {
  std::mt19937_64 chance(p2pkv::test::seed("relay_finds_the_end_of_a_body_however_it_is_cut"));
  const std::string chunked =
      "3\r\nabc\r\n0A ;x=y\r\n0123456789\r\n1\r\n\n\r\n0\r\nwhat: ever\r\nand: more\r\n\r\n";
  for (int round = 0; round < 200; ++round) {
    for (const int64_t length : {AnswerBody::kChunked, int64_t{14}, AnswerBody::kUntilClosed}) {
      AnswerBody body(length);
      std::string payload;
      CHECK(feed(body, length == AnswerBody::kChunked ? chunked : "abc0123456789\n", payload, 1 + round % 20,
                 chance));
      CHECK(payload == "abc0123456789\n");
      CHECK(body.is_complete() == (length != AnswerBody::kUntilClosed));
      body.close();
      CHECK(body.is_complete() && !body.is_spoilt());
      if (length == AnswerBody::kUntilClosed) continue;
      CHECK(body.feed("HTTP/1.1 200 OK", payload) && body.is_spoilt() && payload.size() == 14);
    }
  }
}

TEST(relay_refuses_a_body_that_is_no_http) {
  const std::string_view wrong[] = {"x",        "\r\n",       "-1\r\n",        "3\r\nabcd",
                                    "3\nabc",   "3\r\nabc\n", "3;x\ny\r\nabc", "0000000000000003",
                                    "3 x\rabc", "0\r\na\nb"};
  for (const std::string_view raw : wrong) {
    AnswerBody body(AnswerBody::kChunked);
    std::string payload;
    CHECK(!body.feed(raw, payload) && !body.is_complete());
    CHECK(!body.feed("0\r\n\r\n", payload));
  }
  AnswerBody body(AnswerBody::kChunked);
  std::string payload;
  CHECK(!body.feed("1;" + std::string(AnswerBody::kMaxFraming + 1, 'x'), payload));
  AnswerBody cut(5);
  CHECK(cut.feed("abcd", payload));
  cut.close();
  CHECK(!cut.is_complete());
}

TEST(relay_has_whole_events_however_they_are_cut) {
  std::mt19937_64 chance(p2pkv::test::seed("relay_has_whole_events_however_they_are_cut"));
  for (int round = 0; round < 300; ++round) {
    const std::string blank = chance() % 2 ? "\n\n" : "\r\n\r\n";
    std::string raw, got;
    for (int i = 0; i < 30; ++i) raw += "data: " + std::string(chance() % 30, 'x') + blank;
    EventStream stream;
    const size_t most = 1 + chance() % 40;
    std::string_view left = raw;
    while (!left.empty()) {
      const size_t n = std::min<size_t>(left.size(), 1 + chance() % most), before = got.size();
      CHECK(stream.feed(left.substr(0, n), got));
      left.remove_prefix(n);
      CHECK(got.size() == before || got.ends_with(blank));
      CHECK(got.size() + (stream.is_between() ? 0 : 1) <= raw.size() - left.size());
    }
    CHECK(got == raw && stream.is_between() && !stream.is_done());
    CHECK(feed(stream, "data: [DONE]" + blank, got, most, chance) && stream.is_done() && stream.is_between());
  }
}

TEST(relay_takes_no_text_for_the_end_of_a_stream) {
  EventStream stream;
  std::string events;
  CHECK(stream.feed("data: {\"text\": \"data: [DONE]\"}\n\n", events) && !stream.is_done());
  CHECK(stream.feed("data: [DO", events) && !stream.is_done() && !stream.is_between());
}

TEST(relay_limits_an_event) {
  EventStream stream;
  std::string events;
  const std::string piece(65536, 'x');
  for (size_t i = 0; i < EventStream::kMaxEvent / piece.size(); ++i) CHECK(stream.feed(piece, events));
  CHECK(!stream.feed("x", events) && events.empty());
}

}  // namespace
