// Built once for each instruction set, with different flags; MURMURATE_TOPICS names the table that this build fills.
#include "topics.hpp"

#include <cmath>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace murmurate {
namespace {

// numbers in a register
#if defined(__AVX512F__)
constexpr int64_t kWide = 16;
#elif defined(__AVX2__)
constexpr int64_t kWide = 8;
#else
constexpr int64_t kWide = 4;
#endif

// -- registers of numbers -----------------------------------------------------------------------------------

#if defined(__GNUC__)
typedef float Lanes __attribute__((vector_size(4 * kWide)));
typedef int32_t Bits __attribute__((vector_size(4 * kWide)));
typedef float Unaligned __attribute__((vector_size(4 * kWide), aligned(4)));

inline Lanes load(const float* at) { return *reinterpret_cast<const Unaligned*>(at); }
inline void store(float* at, Lanes x) { *reinterpret_cast<Unaligned*>(at) = x; }
inline Lanes all(float x) { return x - Lanes{}; }  // x in all lanes
inline Lanes as_numbers(Bits x) { return reinterpret_cast<Lanes>(x); }
inline Bits as_bits(Lanes x) { return reinterpret_cast<Bits>(x); }
inline Lanes greater(Lanes a, Lanes b) { return a > b ? a : b; }
inline Lanes lesser(Lanes a, Lanes b) { return a < b ? a : b; }
#else
struct Bits {
  int32_t of[kWide];
};
struct Lanes {
  float of[kWide];
};
#define LANEWISE(sign)                                                          \
  inline Lanes operator sign(Lanes a, Lanes b) {                                \
    for (int i = 0; i < kWide; ++i) a.of[i] = a.of[i] sign b.of[i];             \
    return a;                                                                   \
  }
LANEWISE(+) LANEWISE(-) LANEWISE(*) LANEWISE(/)
#undef LANEWISE
inline Lanes& operator+=(Lanes& a, Lanes b) { return a = a + b; }
inline Lanes load(const float* at) {
  Lanes x;
  std::memcpy(x.of, at, sizeof x.of);
  return x;
}
inline void store(float* at, Lanes x) { std::memcpy(at, x.of, sizeof x.of); }
inline Lanes all(float x) {
  Lanes y;
  for (float& lane : y.of) lane = x;
  return y;
}
inline Lanes as_numbers(Bits x) {
  Lanes y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline Bits as_bits(Lanes x) {
  Bits y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline Lanes greater(Lanes a, Lanes b) {
  for (int i = 0; i < kWide; ++i) a.of[i] = a.of[i] > b.of[i] ? a.of[i] : b.of[i];
  return a;
}
inline Lanes lesser(Lanes a, Lanes b) {
  for (int i = 0; i < kWide; ++i) a.of[i] = a.of[i] < b.of[i] ? a.of[i] : b.of[i];
  return a;
}
inline Bits operator+(Bits a, int32_t b) {
  for (int32_t& lane : a.of) lane += b;
  return a;
}
inline Bits operator<<(Bits a, int b) {
  for (int32_t& lane : a.of) lane <<= b;
  return a;
}
#endif

#if !defined(__AVX512F__)
// Joins halves of the lanes until one number is left.
template <typename Join>
inline float reduce(Lanes x, Join join) {
  float of[kWide];
  store(of, x);
  for (int64_t width = kWide / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i) of[i] = join(of[i], of[i + width]);
  return of[0];
}
#endif

inline float sum(Lanes x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#else
  return reduce(x, [](float a, float b) { return a + b; });
#endif
}

inline float greatest(Lanes x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(x));
#else
  return reduce(x, [](float a, float b) { return a > b ? a : b; });
#endif
}

// Sums of the lanes of four registers at once.
inline void sums(const Lanes* x, float* out) {
#if defined(__AVX512F__)
  const __m512 a = reinterpret_cast<__m512>(x[0]), b = reinterpret_cast<__m512>(x[1]);
  const __m512 c = reinterpret_cast<__m512>(x[2]), d = reinterpret_cast<__m512>(x[3]);
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 four = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(x[i]);
#endif
}

// -- exp(digamma(x)) ----------------------------------------------------------------------------------------

// exp(x) for x <= 0: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; below -87 it is 0.
inline Lanes exp_of_negative(Lanes x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest whole number in the low bits
  const Lanes shifted = x * all(1.44269504f) + all(kRound);
  const Lanes n = shifted - all(kRound);
  const Lanes f = (x - n * all(0.693359375f)) - n * all(-2.12194440e-4f);
  Lanes p = all(1.9875691500e-4f);
  p = p * f + all(1.3981999507e-3f);
  p = p * f + all(8.3334519073e-3f);
  p = p * f + all(4.1665795894e-2f);
  p = p * f + all(1.6666665459e-1f);
  p = p * f + all(0.5f);
  p = p * f * f + f + all(1.0f);
  const Lanes power = as_numbers((as_bits(shifted) + 127) << 23);  // the low bits of `shifted` hold n
#if defined(__GNUC__)
  return reinterpret_cast<Lanes>(reinterpret_cast<Bits>(p * power) & (x > all(-87.0f)));
#else
  Lanes result = p * power;
  for (int i = 0; i < kWide; ++i)
    if (!(x.of[i] > -87.0f)) result.of[i] = 0.0f;
  return result;
#endif
}

// exp(digamma(x) + 1/most) for 0 < x <= most. Near 0 digamma(x) is -1/x, whose exponential underflows in float32 from
// x = 0.01 downwards; only ratios to the greatest number of a row matter, so 1/most is added. 1/x - 1/most is computed
// as (1 - x/most) / x, to avoid cancellation. digamma(x) = digamma(x + 4) - 1/x - 1/(x+1) - 1/(x+2) - 1/(x+3). With
// y = x - 1/2, exp(digamma(x)) is y + 1/24y - 37/5760y^3 + 10313/2903040y^5 - ..., which needs neither log nor exp.
// In the fractions x is at most 1e9, as x^4 would overflow from 4e9 on; beyond, they are below float precision.
inline Lanes exp_digamma(Lanes x, Lanes most, Lanes inverse_most) {
  const Lanes c = lesser(x, all(1e9f));
  const Lanes p = ((c + all(6.0f)) * c + all(11.0f)) * c + all(6.0f);  // (c + 1)(c + 2)(c + 3)
  const Lanes slope = (all(3.0f) * c + all(12.0f)) * c + all(11.0f);  // derivative of p
  const Lanes fractions = ((most - x) * inverse_most * p + c * slope) / (c * p);
  const Lanes y = x + all(3.5f), inverse = all(1.0f) / y, square = inverse * inverse;
  Lanes series = all(-3.9535574e-3f);
  series = series * square + all(3.5524829e-3f);
  series = series * square + all(-6.4236111e-3f);
  series = series * square + all(4.1666667e-2f);
  return (y + series * inverse) * exp_of_negative(all(0.0f) - fractions);
}

// exp_digamma of a row, whose greatest number is `most`.
void exp_digamma_of(const float* x, int64_t width, float* out) {
  Lanes most = load(x);
  for (int64_t k = kWide; k < width; k += kWide) most = greater(most, load(x + k));
  most = all(greatest(most));
  const Lanes inverse = all(1.0f) / most;
  for (int64_t k = 0; k < width; k += kWide) store(out + k, exp_digamma(load(x + k), most, inverse));
}

// -- rows ---------------------------------------------------------------------------------------------------

constexpr int64_t kAhead = 6;  // so many rows before its use a row is prefetched

inline void prefetch(const float* row, int64_t width) {
#if defined(__GNUC__)
  for (int64_t at = 0; at < width; at += kWide) __builtin_prefetch(row + at);
#else
  (void)row, (void)width;
#endif
}

void expected(const float* x, int64_t width, int64_t topics, const int64_t* row, int64_t rows, float scale,
              float offset, const float* factor, float* beta) {
  for (int64_t r = 0; r < rows; ++r) {
    if (r + kAhead < rows) prefetch(x + row[r + kAhead] * width, width);
    const float* from = x + row[r] * width;
    float* to = beta + r * width;
    Lanes most = load(from);
    for (int64_t k = kWide; k < topics; k += kWide) most = greater(most, load(from + k));
    most = all(offset) + all(scale) * all(greatest(most));
    const Lanes inverse = all(1.0f) / most;
    for (int64_t k = 0; k < topics; k += kWide)
      store(to + k, exp_digamma(all(offset) + all(scale) * load(from + k), most, inverse) * load(factor + k));
    for (int64_t k = topics; k < width; ++k) to[k] = 0.0f;
  }
}

void add_rows(float* x, int64_t width, const int64_t* row, int64_t rows, const float* values, float step) {
  for (int64_t r = 0; r < rows; ++r) {
    if (r + kAhead < rows) prefetch(x + row[r + kAhead] * width, width);
    float* to = x + row[r] * width;
    for (int64_t k = 0; k < width; k += kWide)
      store(to + k, load(to + k) + all(step) * load(values + r * width + k));
  }
}

// -- documents ----------------------------------------------------------------------------------------------

constexpr float kTiny = 1e-30f;  // avoids a division by 0 for a word that no topic has

// kRegisters: registers for a row, if they are few enough for all sums to stay in registers; else 0.
template <int64_t kRegisters>
struct Fold {
  int64_t width;
  int64_t registers() const { return kRegisters ? kRegisters : width / kWide; }

  // ratio[i] <- times[i] / (theta . beta of word i); word_sums <- sum over words i of ratio[i] * beta of word i.
  // The new gamma is alpha + theta * word_sums.
  void sum_words(const float* rows, const float* times, int64_t words, const float* theta, float* word_sums,
                 float* ratio) const {
    const int64_t n = registers();
    constexpr int64_t kRoom = kRegisters ? kRegisters : 1;  // arrays have at least one element
    if constexpr (kRegisters != 0) {
      Lanes t[kRoom], g[kRoom];
      for (int64_t k = 0; k < kRoom; ++k) t[k] = load(theta + k * kWide), g[k] = all(0.0f);
      int64_t i = 0;
      for (; i + 4 <= words; i += 4) {
        Lanes p[4];
        for (int64_t j = 0; j < 4; ++j) {
          const float* row = rows + (i + j) * kRoom * kWide;
          p[j] = t[0] * load(row);
          for (int64_t k = 1; k < kRoom; ++k) p[j] += t[k] * load(row + k * kWide);
        }
        float dot[4];
        sums(p, dot);
        for (int64_t j = 0; j < 4; ++j) ratio[i + j] = times[i + j] / (dot[j] + kTiny);
        for (int64_t j = 0; j < 4; ++j) {
          const float* row = rows + (i + j) * kRoom * kWide;
          const Lanes r = all(ratio[i + j]);
          for (int64_t k = 0; k < kRoom; ++k) g[k] += r * load(row + k * kWide);
        }
      }
      for (; i < words; ++i) {
        const float* row = rows + i * kRoom * kWide;
        Lanes p = t[0] * load(row);
        for (int64_t k = 1; k < kRoom; ++k) p += t[k] * load(row + k * kWide);
        ratio[i] = times[i] / (sum(p) + kTiny);
        for (int64_t k = 0; k < kRoom; ++k) g[k] += all(ratio[i]) * load(row + k * kWide);
      }
      for (int64_t k = 0; k < kRoom; ++k) store(word_sums + k * kWide, g[k]);
    } else {
      for (int64_t k = 0; k < n; ++k) store(word_sums + k * kWide, all(0.0f));
      for (int64_t i = 0; i < words; ++i) {
        const float* row = rows + i * width;
        Lanes p = all(0.0f);
        for (int64_t k = 0; k < n; ++k) p += load(theta + k * kWide) * load(row + k * kWide);
        ratio[i] = times[i] / (sum(p) + kTiny);
        for (int64_t k = 0; k < n; ++k)
          store(word_sums + k * kWide, load(word_sums + k * kWide) + all(ratio[i]) * load(row + k * kWide));
      }
    }
  }
};

template <int64_t kRegisters>
int64_t fold(const Documents& documents, const float* beta, int64_t width, int64_t topics, const float* alpha,
             int64_t iterations, float tolerance, float* work, float* gamma, float* statistics) {
  const Fold<kRegisters> fold{width};
  float* rows = work;  // copies of one document's rows of beta, contiguous as each iteration reads them
  float* ratio = rows + documents.longest * width;
  float* theta = ratio + documents.longest;
  float* word_sums = theta + width;
  int64_t done = 0;
  for (int64_t d = 0; d < documents.count; ++d) {
    const int64_t start = documents.starts[d], words = documents.starts[d + 1] - start;
    if (words == 0) continue;
    const int32_t* word = documents.word + start;
    const float* times = documents.times + start;
    float* g = gamma + d * width;
    for (int64_t i = 0; i < words; ++i) {
      if (i + kAhead < words) prefetch(beta + word[i + kAhead] * width, width);
      std::memcpy(rows + i * width, beta + word[i] * width, static_cast<std::size_t>(width) * sizeof(float));
    }
    for (int64_t iteration = 0; iteration < iterations; ++iteration, ++done) {
      exp_digamma_of(g, width, theta);
      fold.sum_words(rows, times, words, theta, word_sums, ratio);
      Lanes moved = all(0.0f);
      for (int64_t k = 0; k < width; k += kWide) {
        const Lanes before = load(g + k), now = load(alpha + k) + load(theta + k) * load(word_sums + k);
        store(g + k, now);
        float change[kWide];
        store(change, now - before);
        for (float& lane : change) lane = std::fabs(lane);
        moved += load(change);
      }
      if (sum(moved) < tolerance * static_cast<float>(topics)) {
        ++done;
        break;
      }
    }
    exp_digamma_of(g, width, theta);
    fold.sum_words(rows, times, words, theta, word_sums, ratio);
    for (int64_t i = 0; i < words; ++i) {
      float* to = statistics + word[i] * width;
      for (int64_t k = 0; k < width; k += kWide)
        store(to + k, load(to + k) + all(ratio[i]) * load(theta + k) * load(rows + i * width + k));
    }
  }
  return done;
}

int64_t fold_in(const Documents& documents, const float* beta, int64_t width, int64_t topics, const float* alpha,
                int64_t iterations, float tolerance, float* work, float* gamma, float* statistics) {
  const int64_t registers = width / kWide;
  const auto variant = registers == 1   ? fold<1>
                       : registers == 2 ? fold<2>
                       : registers == 3 ? fold<3>
                       : registers == 4 ? fold<4>
                       : registers == 7 ? fold<7>
                       : registers == 8 ? fold<8>
                                        : fold<0>;
  return variant(documents, beta, width, topics, alpha, iterations, tolerance, work, gamma, statistics);
}

}  // namespace

extern const TopicKernels MURMURATE_TOPICS;
const TopicKernels MURMURATE_TOPICS = {MURMURATE_NAME, expected, fold_in, add_rows};

}  // namespace murmurate
