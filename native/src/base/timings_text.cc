#include "base/timings_text.h"

#include <charconv>

namespace p2pkv {
namespace {

template <typename Number>
void append_number(std::string* text, Number number) {
  char digits[32];  // the longest double takes 24
  text->append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

}  // namespace

std::string TimingsText::write(const Timings& timings, const std::vector<Note>& notes) const {
  std::vector<const std::string*> behind(starts_.size(), nullptr);
  for (const Note& note : notes) behind.at(note.line) = &note.text;
  std::string text = head_;
  size_t line = 0;
  const auto write_line = [&](auto number) {
    text += starts_.at(line);
    append_number(&text, number);
    if (behind[line] != nullptr) text += *behind[line];
    text += '\n';
    ++line;
  };
  for (const Timings::Reading& reading : timings.read()) {
    uint64_t n = 0;
    for (const uint64_t count : reading.counts) write_line(n += count);
    write_line(n);
    write_line(static_cast<double>(reading.sum_ns) / 1e9);
  }
  return text;
}

}  // namespace p2pkv
