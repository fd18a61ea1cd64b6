// Bindings of what passes streams on. Nothing here waits; only the loop's own work gives up the GIL.
#include "relay/relay.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>
#include <string>
#include <string_view>

#include "bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace p2pkv {
namespace {

std::string_view view_of(const nb::bytes& data) {
  return {data.c_str(), data.size()};
}
nb::bytes bytes_from(const std::string& text) {
  return nb::bytes(text.data(), text.size());
}

nb::bytes fed(AnswerBody& body, const nb::bytes& data) {
  std::string payload;
  if (!body.feed(view_of(data), payload)) throw nb::value_error("the body's framing is no HTTP");
  return bytes_from(payload);
}

nb::bytes whole_of(EventStream& stream, const nb::bytes& data) {
  std::string events;
  if (!stream.feed(view_of(data), events)) throw nb::value_error("an event is too large");
  return bytes_from(events);
}

void bind_parts(nb::module_& m) {
  nb::class_<AnswerBody>(m, "AnswerBody", nb::is_final(), "Finds where the body of an engine's answer ends.")
      .def(nb::init<int64_t>(), "length"_a, "``length`` in bytes, or ``CHUNKED`` or ``UNTIL_CLOSED``.")
      .def("feed", &fed, "data"_a, "Return the payload in ``data``. Raises ValueError if it is no HTTP.")
      .def("close", &AnswerBody::close, "Note that the connection has ended.")
      .def_prop_ro("is_complete", &AnswerBody::is_complete)
      .def_prop_ro("is_spoilt", &AnswerBody::is_spoilt, "Something came behind its end.")
      .def_ro_static("CHUNKED", &AnswerBody::kChunked)
      .def_ro_static("UNTIL_CLOSED", &AnswerBody::kUntilClosed);
  nb::class_<EventStream>(m, "EventStream", nb::is_final(), "Holds back the beginning of an event.")
      .def(nb::init<>())
      .def("feed", &whole_of, "data"_a,
           "Return the whole events that are there now. Raises ValueError if one has more than ``MAX_EVENT`` "
           "bytes.")
      .def_prop_ro(
          "is_whole", [](const EventStream& s) { return s.is_done() && s.is_between(); },
          "The event that ends streams was there, and nothing is held back.")
      .def_ro_static("MAX_EVENT", &EventStream::kMaxEvent);
}

void bind_patience(nb::module_& m) {
  nb::class_<Patience>(m, "Patience", nb::is_final(),
                       "How long an engine's next bytes are waited for, by whoever waits just now.")
      .def(
          "__init__",
          [](Patience* self, double seconds, double if_failing) { new (self) Patience{seconds, if_failing}; },
          "seconds"_a, "if_failing"_a = std::numeric_limits<double>::infinity(),
          "``if_failing``: in seconds too, while its health check fails.")
      .def_rw("is_failing", &Patience::is_failing, "The engine's health check fails.")
      .def_prop_ro("now", &Patience::now, "In seconds.");
}

}  // namespace

void bind_relay(nb::module_& m) {
  bind_parts(m);
  bind_patience(m);
  using End = Relay::End;
  nb::enum_<End>(m, "RelayEnd", "How a stream has ended.")
      .value("WHOLE", End::kWhole)
      .value("ENDED_EARLY", End::kEndedEarly)
      .value("HUNG_UP", End::kHungUp)
      .value("NO_HTTP", End::kNoHttp)
      .value("TOO_LARGE", End::kTooLarge)
      .value("ENGINE_SILENT", End::kEngineSilent)
      .value("CLIENT_SLOW", End::kClientSlow)
      .value("CLIENT_GONE", End::kClientGone);
  nb::class_<Relay>(
      m, "Relay", nb::is_final(),
      "Passes events on, from engines to clients. Used by one event loop, which calls ``run`` when "
      "``fd`` is readable. See proxy/p2pkv_proxy/relaying.py.")
      .def(nb::init<>())
      .def_prop_ro("fd", &Relay::fd)
      .def("__len__", &Relay::size)
      .def(
          "add",
          [](Relay& relay, int engine, int client, std::shared_ptr<AnswerBody> body,
             std::shared_ptr<EventStream> events, std::shared_ptr<Patience> patience,
             double client_patience) {
            return relay.add(engine, client, std::move(body), std::move(events), std::move(patience),
                             client_patience);
          },
          "engine"_a, "client"_a, "body"_a, "events"_a, "patience"_a, "client_patience"_a,
          "Begin to pass on, between copies of two descriptors. Return the stream's name; 0 if there are no "
          "more descriptors. ``patience`` is for the engine, ``client_patience`` in seconds.")
      .def("run", &Relay::run, nb::call_guard<nb::gil_scoped_release>(),
           "Do what can be done without waiting; return the streams that have ended, each to be removed.")
      .def("sweep", &Relay::sweep, "End the streams whose engine or client was waited for too long.")
      .def(
          "remove", [](Relay& relay, uint64_t name) { return bytes_from(relay.remove(name)); }, "name"_a,
          "End a stream; return what its client must get before it gets anything else.");
}

}  // namespace p2pkv
