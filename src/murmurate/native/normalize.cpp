// Built once for each instruction set, with different flags; MURMURATE_NORMALIZE names the table that this build fills.
// Loops run over a few channels at a time, so that compilers vectorise them.
#include "normalize.hpp"

#include <cstring>
#include <memory>
#include <new>

#include "threads.hpp"

namespace murmurate {
namespace {

constexpr int64_t kLanes = 16;             // channels whose sums stay in registers
constexpr int64_t kBlockBytes = 16 << 10;  // a block is read twice, the second time from the nearest cache
constexpr int64_t kParts = 16;             // fixed, so that results do not depend on the number of threads

struct Bf16 {  // bfloat16
  uint16_t bits;
};

inline float widened(float x) { return x; }
inline float widened(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, Bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T>
int64_t block_rows(int64_t channels) {
  const int64_t rows = kBlockBytes / (channels * static_cast<int64_t>(sizeof(T)));
  return rows < 8 ? 8 : rows;
}

// Calls work(part, first row, rows) for up to kParts ranges of rows.
template <typename Work>
void over_rows(int64_t rows, int64_t threads, const Work& work) {
  const int64_t each = (rows + kParts - 1) / kParts;
  in_parts(threads, kParts, [&](int64_t part) {
    const int64_t first = part * each;
    if (first < rows) work(part, first, smaller(each, rows - first));
  });
}

// Calls work(first channel, channels) with a constant number of channels wherever there are enough.
template <typename Work>
inline void over_lanes(int64_t channels, const Work& work) {
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes) work(c, kLanes);
  if (c < channels) work(c, channels - c);
}

template <typename T>
void block_moments(const T* x, int64_t rows, int64_t stride, int64_t lanes, float* mean, float* squares) {
  float sum[kLanes] = {}, square[kLanes] = {}, centre[kLanes];
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < lanes; ++k) sum[k] += widened(x[r * stride + k]);
  for (int64_t k = 0; k < lanes; ++k) centre[k] = sum[k] / static_cast<float>(rows);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < lanes; ++k) {
      const float d = widened(x[r * stride + k]) - centre[k];
      square[k] += d * d;
    }
  for (int64_t k = 0; k < lanes; ++k) mean[k] = centre[k], squares[k] = square[k];
}

// Merges the moments of `more` numbers into those of `count` numbers (Chan, Golub and LeVeque 1983).
inline void merge(double count, double* mean, double* squares, double more, double more_mean, double more_squares) {
  const double total = count + more, difference = more_mean - *mean;
  *mean += difference * more / total;
  *squares += more_squares + difference * difference * count * more / total;
}

template <typename T>
bool moments_of(Rows n, const T* x, double* mean, double* squares, int64_t threads) {
  const int64_t C = n.channels, size = kParts * C;
  std::unique_ptr<double[]> parts(new (std::nothrow) double[static_cast<std::size_t>(2 * size)]());
  if (!parts) return false;
  double *means = parts.get(), *sums = means + size;
  over_rows(n.rows, threads, [&](int64_t part, int64_t first, int64_t rows) {
    double *m = means + part * C, *s = sums + part * C;
    const int64_t block = block_rows<T>(C);
    for (int64_t r = 0; r < rows; r += block) {
      const int64_t count = smaller(block, rows - r);
      over_lanes(C, [&](int64_t c, int64_t lanes) {
        float block_mean[kLanes], block_squares[kLanes];
        const T* from = x + (first + r) * C + c;
        if (lanes == kLanes)
          block_moments(from, count, C, kLanes, block_mean, block_squares);
        else
          block_moments(from, count, C, lanes, block_mean, block_squares);
        for (int64_t k = 0; k < lanes; ++k)
          merge(static_cast<double>(r), m + c + k, s + c + k, static_cast<double>(count), block_mean[k],
                block_squares[k]);
      });
    }
  });
  const int64_t each = (n.rows + kParts - 1) / kParts;
  for (int64_t c = 0; c < C; ++c) mean[c] = means[c], squares[c] = sums[c];
  for (int64_t part = 1; part * each < n.rows; ++part)
    for (int64_t c = 0; c < C; ++c)
      merge(static_cast<double>(part * each), mean + c, squares + c,
            static_cast<double>(smaller(each, n.rows - part * each)), means[part * C + c], sums[part * C + c]);
  return true;
}

template <bool kResidual, bool kRectify, typename T>
void apply_rows(const T* x, const T* residual, const float* scale, const float* shift, int64_t rows, int64_t C,
                T* y) {
  for (int64_t r = 0; r < rows; ++r) {
    const T *from = x + r * C, *residual_row = kResidual ? residual + r * C : nullptr;
    T* to = y + r * C;
    for (int64_t c = 0; c < C; ++c) {
      float v = widened(from[c]) * scale[c] + shift[c];
      if (kResidual) v += widened(residual_row[c]);
      if (kRectify) v = v < 0.0f ? 0.0f : v;  // NaN stays
      narrow(v, to + c);
    }
  }
}

template <typename T>
void apply_to(Rows n, const T* x, const T* residual, const float* scale, const float* shift, bool rectify, T* y,
              int64_t threads) {
  const auto on_rows = residual ? (rectify ? apply_rows<true, true, T> : apply_rows<true, false, T>)
                                : (rectify ? apply_rows<false, true, T> : apply_rows<false, false, T>);
  over_rows(n.rows, threads, [&](int64_t, int64_t first, int64_t rows) {
    const int64_t skip = first * n.channels;
    on_rows(x + skip, residual ? residual + skip : nullptr, scale, shift, rows, n.channels, y + skip);
  });
}

// The gradient of a ReLU's input, given that of its output y.
template <typename T>
inline float through_relu(T gradient, T y) {
  return widened(y) <= 0.0f ? 0.0f : widened(gradient);
}

template <bool kMasked, typename T>
void block_sums(const T* gradient, const T* y, const T* x, const float* mean, int64_t rows, int64_t stride,
                int64_t lanes, float* sum, float* product) {
  float s[kLanes] = {}, p[kLanes] = {}, centre[kLanes];
  for (int64_t k = 0; k < lanes; ++k) centre[k] = mean[k];
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < lanes; ++k) {
      const int64_t i = r * stride + k;
      const float g = kMasked ? through_relu(gradient[i], y[i]) : widened(gradient[i]);
      s[k] += g;
      p[k] += g * (widened(x[i]) - centre[k]);
    }
  for (int64_t k = 0; k < lanes; ++k) sum[k] = s[k], product[k] = p[k];
}

template <bool kMasked, typename T>
bool sums_of(Rows n, const T* gradient, const T* y, const T* x, const float* mean, double* sum, double* product,
             int64_t threads) {
  const int64_t C = n.channels, size = kParts * C;
  std::unique_ptr<double[]> parts(new (std::nothrow) double[static_cast<std::size_t>(2 * size)]());
  if (!parts) return false;
  double *sums = parts.get(), *products = sums + size;
  over_rows(n.rows, threads, [&](int64_t part, int64_t first, int64_t rows) {
    const int64_t block = block_rows<T>(C);
    for (int64_t r = 0; r < rows; r += block) {
      const int64_t count = smaller(block, rows - r);
      over_lanes(C, [&](int64_t c, int64_t lanes) {
        float s[kLanes], p[kLanes];
        const int64_t skip = (first + r) * C + c;
        const T* mask = kMasked ? y + skip : nullptr;
        if (lanes == kLanes)
          block_sums<kMasked>(gradient + skip, mask, x + skip, mean + c, count, C, kLanes, s, p);
        else
          block_sums<kMasked>(gradient + skip, mask, x + skip, mean + c, count, C, lanes, s, p);
        for (int64_t k = 0; k < lanes; ++k) sums[part * C + c + k] += s[k], products[part * C + c + k] += p[k];
      });
    }
  });
  std::memset(sum, 0, static_cast<std::size_t>(C) * sizeof(double));
  std::memset(product, 0, static_cast<std::size_t>(C) * sizeof(double));
  for (int64_t i = 0; i < size; ++i) sum[i % C] += sums[i], product[i % C] += products[i];
  return true;
}

template <bool kMasked, bool kResidual, typename T>
void gradient_rows(const T* gradient, const T* y, const T* x, const float* a, const float* b, const float* c,
                   int64_t rows, int64_t C, T* x_gradient, T* residual_gradient) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t skip = r * C;
    for (int64_t k = 0; k < C; ++k) {
      const float g = kMasked ? through_relu(gradient[skip + k], y[skip + k]) : widened(gradient[skip + k]);
      narrow(a[k] * g + (b[k] * widened(x[skip + k]) + c[k]), x_gradient + skip + k);
      if (kResidual) narrow(g, residual_gradient + skip + k);
    }
  }
}

template <typename T>
void gradient_of(Rows n, const T* gradient, const T* y, const T* x, const float* a, const float* b, const float* c,
                 T* x_gradient, T* residual_gradient, int64_t threads) {
  const auto on_rows = y ? (residual_gradient ? gradient_rows<true, true, T> : gradient_rows<true, false, T>)
                         : (residual_gradient ? gradient_rows<false, true, T> : gradient_rows<false, false, T>);
  over_rows(n.rows, threads, [&](int64_t, int64_t first, int64_t rows) {
    const int64_t skip = first * n.channels;
    on_rows(gradient + skip, y ? y + skip : nullptr, x + skip, a, b, c, rows, n.channels, x_gradient + skip,
            residual_gradient ? residual_gradient + skip : nullptr);
  });
}

template <typename T>
const T* as(const void* x) {
  return static_cast<const T*>(x);
}
template <typename T>
T* as(void* x) {
  return static_cast<T*>(x);
}

bool moments(Rows n, int bits, const void* x, double* mean, double* squares, int64_t threads) {
  return bits == 16 ? moments_of(n, as<Bf16>(x), mean, squares, threads)
                    : moments_of(n, as<float>(x), mean, squares, threads);
}

void apply(Rows n, int bits, const void* x, const void* residual, const float* scale, const float* shift, bool rectify,
           void* y, int64_t threads) {
  if (bits == 16)
    apply_to(n, as<Bf16>(x), as<Bf16>(residual), scale, shift, rectify, as<Bf16>(y), threads);
  else
    apply_to(n, as<float>(x), as<float>(residual), scale, shift, rectify, as<float>(y), threads);
}

template <typename T>
bool sums(Rows n, const void* gradient, const void* y, const void* x, const float* mean, double* sum, double* product,
          int64_t threads) {
  const auto variant = y ? sums_of<true, T> : sums_of<false, T>;
  return variant(n, as<T>(gradient), as<T>(y), as<T>(x), mean, sum, product, threads);
}

bool gradient_sums(Rows n, int bits, const void* gradient, const void* y, const void* x, const float* mean,
                   double* sum, double* product, int64_t threads) {
  return (bits == 16 ? sums<Bf16> : sums<float>)(n, gradient, y, x, mean, sum, product, threads);
}

void gradient(Rows n, int bits, const void* y_gradient, const void* y, const void* x, const float* a, const float* b,
              const float* c, void* x_gradient, void* residual_gradient, int64_t threads) {
  if (bits == 16)
    gradient_of(n, as<Bf16>(y_gradient), as<Bf16>(y), as<Bf16>(x), a, b, c, as<Bf16>(x_gradient),
                as<Bf16>(residual_gradient), threads);
  else
    gradient_of(n, as<float>(y_gradient), as<float>(y), as<float>(x), a, b, c, as<float>(x_gradient),
                as<float>(residual_gradient), threads);
}

}  // namespace

extern const NormalizeKernels MURMURATE_NORMALIZE;
const NormalizeKernels MURMURATE_NORMALIZE = {MURMURATE_NAME, moments, apply, gradient_sums, gradient};

}  // namespace murmurate
