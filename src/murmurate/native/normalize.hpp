// Batch normalisation with the addition and the ReLU that follow it in a residual net. The forward pass goes through
// memory twice, and so does the backward pass. Images are channels last: [rows, channels], a row for each pixel of each
// image.
#pragma once

#include <cstdint>

namespace murmurate {

constexpr int64_t kMostNormalized = 1 << 16;  // channels

struct Rows {
  int64_t rows, channels;
};

// bits: 16 for bfloat16, 32 for float32. Coefficients and sums are [channels] float32 or double. threads: as in
// threads.hpp; results do not depend on it. moments and gradient_sums return false if there is not enough memory.
struct NormalizeKernels {
  const char* name;
  // mean [channels], and the sum of squared differences from it
  bool (*moments)(Rows, int bits, const void* x, double* mean, double* squares, int64_t threads);
  // y = scale x + shift (+ residual, if there is one), and at least 0 if `rectify`
  void (*apply)(Rows, int bits, const void* x, const void* residual, const float* scale, const float* shift,
                bool rectify, void* y, int64_t threads);
  // The sums of g and of g (x - mean); g is the gradient of y, or 0 where y (if it is given) is at most 0.
  bool (*gradient_sums)(Rows, int bits, const void* gradient, const void* y, const void* x, const float* mean,
                        double* sum, double* product, int64_t threads);
  // x_gradient = a g + b x + c; residual_gradient = g, if there is a residual
  void (*gradient)(Rows, int bits, const void* gradient, const void* y, const void* x, const float* a, const float* b,
                   const float* c, void* x_gradient, void* residual_gradient, int64_t threads);
};

extern const NormalizeKernels kNormalizePortable;
extern const NormalizeKernels kNormalizeAvx2;
extern const NormalizeKernels kNormalizeAvx512;

}  // namespace murmurate
