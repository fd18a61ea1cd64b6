// The texts of a call's keys, without a copy.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>
#include <vector>

namespace p2pkv {

// Borrowed from `keys`, a list or tuple: they are good while it is there and the GIL is held. Throws what
// Python is to raise for a key that is neither str nor bytes, or has no UTF-8.
inline std::vector<std::string_view> borrow_texts(nanobind::handle keys) {
  const auto n = static_cast<size_t>(PySequence_Fast_GET_SIZE(keys.ptr()));
  std::vector<std::string_view> texts(n);
  for (size_t i = 0; i < n; ++i) {
    PyObject* key = PySequence_Fast_GET_ITEM(keys.ptr(), static_cast<Py_ssize_t>(i));
    Py_ssize_t size = 0;
    if (PyUnicode_Check(key)) {
      const char* text = PyUnicode_AsUTF8AndSize(key, &size);
      if (text == nullptr) throw nanobind::python_error();
      texts[i] = {text, static_cast<size_t>(size)};
    } else if (PyBytes_Check(key)) {
      texts[i] = {PyBytes_AS_STRING(key), static_cast<size_t>(PyBytes_GET_SIZE(key))};
    } else {
      throw nanobind::type_error(("key " + std::to_string(i) + " is neither str nor bytes").c_str());
    }
  }
  return texts;
}

}  // namespace p2pkv
