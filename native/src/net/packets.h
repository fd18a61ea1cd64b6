// Packets over a Unix socket, with a descriptor now and then.
#pragma once

#include <cstddef>
#include <type_traits>

#include "base/clock.h"
#include "base/fd.h"

namespace p2pkv {

// Whether a process of this user made the socket at the other end.
bool is_own_user(int connection);

enum class Received { kPacket, kNothing, kWrong, kEnd };

// False where it can't be sent at once. `fd`, if it is one, goes along and stays the caller's.
bool send_bytes(int connection, const void* data, size_t nbytes, int fd = -1);
// Never blocks. kWrong: one of another length. Descriptors that nobody expects are closed:
// all of a packet that brings more than one.
Received receive_bytes(int connection, void* data, size_t nbytes, UniqueFd* fd = nullptr);
// Waits until there is something to receive, or the other end is gone; false at the deadline.
bool wait_readable(int connection, const Deadline& deadline);
bool wait_writable(int connection, const Deadline& deadline);
// Whether the other end has closed the connection, though there may be packets of it that nobody has read.
bool has_hung_up(int connection);

template <typename Packet>
bool send_packet(int connection, const Packet& packet, int fd = -1) {
  static_assert(std::is_trivially_copyable_v<Packet>);
  return send_bytes(connection, &packet, sizeof packet, fd);
}

template <typename Packet>
Received receive_packet(int connection, Packet* packet, UniqueFd* fd = nullptr) {
  static_assert(std::is_trivially_copyable_v<Packet>);
  return receive_bytes(connection, packet, sizeof *packet, fd);
}

}  // namespace p2pkv
