// What the machine can do at best, as a measure for the kernels: bytes read, products in registers.
#pragma once

#include "kernels/declare.hpp"

namespace bifolio {

struct ReadProbeArgs {
  const uint8_t* data;
  int64_t bytes;  // a multiple of 64 KiB
  int64_t* sink;  // [1]: keeps the reads from being left out
};

// Which product to repeat: the one that Codes::fp32, bf16 or int8 (and int4) weights use.
enum class Product : int64_t { fp32, bf16, int8 };

struct PeakProbeArgs {
  int64_t product;
  int64_t repeats;      // of kernel-sized tiles
  int64_t* operations;  // [1]: multiplications and additions done, written
  int64_t* sink;        // [1]
};

BIFOLIO_DECLARE(read_probe, ReadProbeArgs)
BIFOLIO_DECLARE(peak_probe, PeakProbeArgs)

}  // namespace bifolio
