// Kernel calls in the order in which they were made, to be made again with the same arguments.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "runtime/thread_pool.hpp"

namespace bifolio {

// Arguments point into buffers that whoever records keeps alive and refills.
class Tape {
 public:
  template <class Args>
  void append(Kernel<Args> kernel, const Args& args) {
    calls_.emplace_back([kernel, args](ThreadPool& pool) { kernel(args, pool); });
  }
  void replay(ThreadPool& pool) const {
    for (const auto& call : calls_) call(pool);
  }
  std::size_t size() const noexcept { return calls_.size(); }

 private:
  std::vector<std::function<void(ThreadPool&)>> calls_;
};

}  // namespace bifolio
