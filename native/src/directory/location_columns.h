// Locations as answers over a channel have them: pages of one batch differ in few of their bytes.
//
// A location is eight 64-bit words. For each of the eight: a width in bytes, the least value among all
// locations, and for each location by how much it exceeds that, in so many bytes. Pages of one owner and one
// size take 15 to 20 bytes each that way instead of 64, which halves what sealing a large answer costs.
// docs/wire.md has the byte table.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "page/location.h"

namespace p2pkv {

// Appends `locations` in that form; nothing if there are none.
void append_columns(const std::vector<Location>& locations, std::string* out);

// Takes `n` locations that are all of `bytes`. False if that is anything else; then `locations` is as it was.
bool take_columns(std::string_view bytes, size_t n, std::vector<Location>* locations);

}  // namespace p2pkv
