// numpy arrays in and out of the core: checked by hand, so that an error names the argument and its shape.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "page/location.h"

namespace p2pkv {

// Any array in host memory; borrowed for the call.
using AnyArray = nanobind::ndarray<nanobind::ro, nanobind::device::cpu>;
constexpr int64_t kAnySize = -1;

// An argument that `require` checks: the type says what `help()` and type checkers are told that it has to
// be.
template <typename T, int64_t... Shape>
struct ArrayOf : AnyArray {
  using AnyArray::AnyArray;
};
using FlagArray = ArrayOf<uint8_t, kAnySize>;
using KeyArray = ArrayOf<uint8_t, kAnySize, sizeof(Key)>;
using LocationArray = ArrayOf<uint8_t, kAnySize, sizeof(Location)>;
using PieceArray = ArrayOf<int64_t, kAnySize, kAnySize, 2>;

inline std::string describe_shape(std::initializer_list<int64_t> shape) {
  std::string text = "(";
  for (const int64_t size : shape) {
    if (text.size() > 1) text += ", ";
    text += size == kAnySize ? "n" : std::to_string(size);
  }
  if (shape.size() == 1) text += ",";
  return text + ")";
}

// The data of a C-contiguous array of T of this shape; ValueError, naming the argument, for any other.
template <typename T>
const T* require(const AnyArray& array, const char* name, std::initializer_list<int64_t> shape) {
  bool fits = array.dtype() == nanobind::dtype<T>() && array.ndim() == shape.size();
  int64_t stride = 1;
  for (size_t i = shape.size(); fits && i-- > 0;) {
    const auto size = static_cast<int64_t>(array.shape(i));
    const int64_t wanted = shape.begin()[i];
    const bool is_contiguous = size <= 1 || array.size() == 0 || array.stride(i) == stride;
    fits = (wanted == kAnySize || wanted == size) && is_contiguous;
    stride *= size;
  }
  if (!fits) {
    const char* kind =
        nanobind::dtype<T>().code == static_cast<uint8_t>(nanobind::dlpack::dtype_code::Int) ? "int" : "uint";
    const std::string message = std::string(name) + " must be a C-contiguous " + kind +
                                std::to_string(8 * sizeof(T)) + " array of shape " + describe_shape(shape);
    throw nanobind::value_error(message.c_str());
  }
  return static_cast<const T*>(array.data());
}

inline const Key* require_keys(const AnyArray& keys) {
  return reinterpret_cast<const Key*>(require<uint8_t>(keys, "keys", {kAnySize, sizeof(Key)}));
}

template <typename T>
using Array = nanobind::ndarray<nanobind::numpy, T>;

// Hands the values to a numpy array of this shape, which owns them.
template <typename T, typename Value>
Array<T> give(std::vector<Value> values, std::initializer_list<size_t> shape) {
  auto* owned = new std::vector<Value>(std::move(values));
  nanobind::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<Value>*>(p); });
  return Array<T>(reinterpret_cast<T*>(owned->data()), shape, owner);
}

}  // namespace p2pkv

template <typename T, int64_t... Shape>
struct nanobind::detail::type_caster<p2pkv::ArrayOf<T, Shape...>> {
  using Array = p2pkv::ArrayOf<T, Shape...>;
  using Shown = ndarray<const T, shape<Shape...>, c_contig, device::cpu>;
  NB_TYPE_CASTER(Array, make_caster<Shown>::Name)

  template <typename Flags>
  bool from_python(handle source, Flags flags, cleanup_list* cleanup) noexcept {
    make_caster<p2pkv::AnyArray> any;
    if (!any.from_python(source, flags, cleanup)) return false;
    static_cast<p2pkv::AnyArray&>(value) = std::move(any.value);
    return true;
  }
};
