// Cuts one block of memory into aligned arrays; with a null block it only adds up their bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bifolio::BIFOLIO_ISA {

class Carver {
 public:
  explicit Carver(uint8_t* base) : base_(base) {}

  template <class T>
  T* take(int64_t count) {
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + kAlign - 1) / kAlign * kAlign;
    return array;
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kAlign = 64;
  uint8_t* base_;
  int64_t used_ = 0;
};

}  // namespace bifolio::BIFOLIO_ISA
