// Threads, the kernels of one instruction set, and a tape while one records.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "kernels/table.hpp"
#include "runtime/isa.hpp"
#include "runtime/tape.hpp"
#include "runtime/thread_pool.hpp"

namespace bifolio {

// The only thread within a Runtime for as long as this lives; std::logic_error if there is another.
class Turn {
 public:
  explicit Turn(std::atomic<bool>& taken) : taken_(taken) {
    if (taken_.exchange(true, std::memory_order_acquire)) {
      throw std::logic_error("a second thread calls a Runtime while it computes");
    }
  }
  ~Turn() { taken_.store(false, std::memory_order_release); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::atomic<bool>& taken_;
};

// One thread calls it at a time.
class Runtime {
 public:
  Runtime(int threads, const std::string& isa)
      : isa_(choose_isa(isa)), kernels_(kernel_table(isa_)), pool_(threads) {}

  Isa isa() const noexcept { return isa_; }
  const KernelTable& kernels() const noexcept { return kernels_; }
  ThreadPool& pool() noexcept { return pool_; }

  template <class Args>
  void call(Kernel<Args> KernelTable::*member, const Args& args) {
    const Turn turn(taken_);
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
  void replay(const Tape& tape) {
    const Turn turn(taken_);
    tape.replay(pool_);
  }

 private:
  Isa isa_;
  const KernelTable& kernels_;
  ThreadPool pool_;
  std::atomic<bool> taken_{false};
  std::shared_ptr<Tape> tape_;
};

}  // namespace bifolio
