// The numpy arrays that cross the binding: their shapes are checked by nanobind, results are owned by Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>

#include "p2pkv/location.h"

namespace p2pkv {

using KeysArray = nanobind::ndarray<const uint8_t, nanobind::shape<-1, sizeof(Key)>, nanobind::c_contig,
                                    nanobind::device::cpu>;
using LocationsArray = nanobind::ndarray<const uint8_t, nanobind::shape<-1, sizeof(Location)>,
                                         nanobind::c_contig, nanobind::device::cpu>;
using PiecesArray =
    nanobind::ndarray<const int64_t, nanobind::shape<-1, -1, 2>, nanobind::c_contig, nanobind::device::cpu>;

inline const Key* keys_of(const KeysArray& keys) {
  return reinterpret_cast<const Key*>(keys.data());
}

// A new array, uninitialised, and where its elements are.
template <typename T>
struct NewArray {
  nanobind::ndarray<nanobind::numpy, T> array;
  T* data;
};

template <typename T>
NewArray<T> make_array(std::initializer_list<size_t> shape) {
  size_t size = 1;
  for (const size_t extent : shape) size *= extent;
  T* data = new T[size];
  nanobind::capsule owner(data, [](void* memory) noexcept { delete[] static_cast<T*>(memory); });
  return {nanobind::ndarray<nanobind::numpy, T>(data, shape.size(), shape.begin(), owner), data};
}

}  // namespace p2pkv
