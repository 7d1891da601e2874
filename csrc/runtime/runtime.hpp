// Threads, the kernels of one instruction set, and a tape while one records.
#pragma once

#include <memory>
#include <string>

#include "kernels/table.hpp"
#include "runtime/isa.hpp"
#include "runtime/tape.hpp"
#include "runtime/thread_pool.hpp"

namespace bifolio {

class Runtime {
 public:
  Runtime(int threads, const std::string& isa)
      : isa_(choose_isa(isa)), kernels_(kernel_table(isa_)), pool_(threads) {}

  Isa isa() const noexcept { return isa_; }
  const KernelTable& kernels() const noexcept { return kernels_; }
  ThreadPool& pool() noexcept { return pool_; }

  template <class Args>
  void call(Kernel<Args> KernelTable::*member, const Args& args) {
    const Kernel<Args> kernel = kernels_.*member;
    if (tape_) tape_->append(kernel, args);
    kernel(args, pool_);
  }

  template <class Args>
  int64_t workspace_bytes(WorkspaceSize<Args> KernelTable::*member, const Args& args) const {
    return (kernels_.*member)(args, pool_);
  }

  void start_recording() { tape_ = std::make_shared<Tape>(); }
  std::shared_ptr<Tape> stop_recording() { return std::move(tape_); }
  bool recording() const noexcept { return tape_ != nullptr; }
  void replay(const Tape& tape) { tape.replay(pool_); }

 private:
  Isa isa_;
  const KernelTable& kernels_;
  ThreadPool pool_;
  std::shared_ptr<Tape> tape_;
};

}  // namespace bifolio
