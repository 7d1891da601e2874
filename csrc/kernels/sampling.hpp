// The choice of tokens from rows of logits. Rules: kernels/reference_sampling.py.
#pragma once

#include "kernels/declare.hpp"

namespace bifolio {

struct GreedyArgs {
  const float* logits;  // [rows, vocab], rows `stride` floats apart
  int32_t* tokens;      // [rows]; the complement for a row with a logit that is not finite
  int64_t rows, vocab, stride;
};

BIFOLIO_DECLARE(greedy, GreedyArgs)

// What one row is drawn by: temperature above 0; top_k 0, top_p 1 and min_p 0 are off.
struct DrawRule {
  double temperature, top_p, min_p, uniform;
  int64_t top_k;
};

struct DrawArgs {
  const float* const* rows;  // [count] pointers to [vocab]
  const DrawRule* rules;     // [count]
  int32_t* tokens;           // [count]; the complement for a row with a logit that is not finite
  uint8_t* workspace;
  int64_t count, vocab;
};

BIFOLIO_DECLARE(draw, DrawArgs)
BIFOLIO_DECLARE_SIZE(draw_workspace, DrawArgs)

struct LogprobsArgs {
  const float* logits;  // [vocab]
  double* logprobs;     // [1 + top]: of the token, then of the best, falling
  int32_t* ids;         // [1 + top]: rank of the token (1 is best), then the best ids
  int64_t vocab, token, top;
};

BIFOLIO_DECLARE(logprobs, LogprobsArgs)

}  // namespace bifolio
