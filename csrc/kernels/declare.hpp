// Declares a kernel in the namespace of every instruction set.
#pragma once

#include <cstdint>

#include "runtime/parallel.hpp"

#define BIFOLIO_DECLARE_IN(isa, name, Args)          \
  namespace isa {                                    \
  void name(const Args& args, ::bifolio::ThreadPool& pool); \
  }

#if defined(BIFOLIO_X86)
#define BIFOLIO_DECLARE(name, Args)         \
  BIFOLIO_DECLARE_IN(portable, name, Args)  \
  BIFOLIO_DECLARE_IN(avx2, name, Args)      \
  BIFOLIO_DECLARE_IN(avx512, name, Args)
#else
#define BIFOLIO_DECLARE(name, Args) BIFOLIO_DECLARE_IN(portable, name, Args)
#endif

// As BIFOLIO_DECLARE, for a function that says how many bytes of workspace the kernel may use.
#define BIFOLIO_DECLARE_SIZE_IN(isa, name, Args)                 \
  namespace isa {                                                \
  int64_t name(const Args& args, const ::bifolio::ThreadPool& pool); \
  }

#if defined(BIFOLIO_X86)
#define BIFOLIO_DECLARE_SIZE(name, Args)        \
  BIFOLIO_DECLARE_SIZE_IN(portable, name, Args) \
  BIFOLIO_DECLARE_SIZE_IN(avx2, name, Args)     \
  BIFOLIO_DECLARE_SIZE_IN(avx512, name, Args)
#else
#define BIFOLIO_DECLARE_SIZE(name, Args) BIFOLIO_DECLARE_SIZE_IN(portable, name, Args)
#endif
