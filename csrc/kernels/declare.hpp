// Declares a kernel, or the size of its workspace, in the namespace of every instruction set.
#pragma once

#include <cstdint>

#include "runtime/parallel.hpp"

#if defined(BIFOLIO_X86)
#define BIFOLIO_DECLARE_EACH(...)       \
  namespace portable { __VA_ARGS__; }   \
  namespace avx2 { __VA_ARGS__; }       \
  namespace avx512 { __VA_ARGS__; }
#else
#define BIFOLIO_DECLARE_EACH(...) \
  namespace portable { __VA_ARGS__; }
#endif

#define BIFOLIO_DECLARE(name, Args) \
  BIFOLIO_DECLARE_EACH(void name(const Args& args, ThreadPool& pool))

// A function that says how many bytes of workspace the kernel may use.
#define BIFOLIO_DECLARE_SIZE(name, Args) \
  BIFOLIO_DECLARE_EACH(int64_t name(const Args& args, const ThreadPool& pool))
