// Built three times, with different flags; MURMURATE_KERNELS names the table that this build fills.
#include "kernels.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || defined(__SSE2__)
#include <immintrin.h>
#endif

namespace murmurate {
namespace {

constexpr float kNever = std::numeric_limits<float>::infinity();
constexpr int kGroup = 64;  // queries that are searched side by side, so that their cache misses overlap

// -- sums along a line --------------------------------------------------------------------------------------

// Where each of 16 numbers adds the last sum of the lower half of its group of 2, 4, 8, 16 (Sklansky 1960):
// sums of numbers that are not negative never fall along the line, whatever is rounded, because the same last
// sum is added to sums that do not fall. All instruction sets add in this order, so trees are equal to the bit.
inline void sums_to(const float* line, float* sum) {
  std::memcpy(sum, line, kLine * sizeof(float));
  for (int half = 1; half < kLine; half *= 2)
    for (int i = 0; i < kLine; ++i)
      if (i & half) sum[i] += sum[(i & ~(2 * half - 1)) + half - 1];
}

#ifdef __AVX512F__

using Line = __m512;

inline Line load(const float* line) { return _mm512_load_ps(line); }

inline Line sums_to(Line x) {
  x = _mm512_mask_add_ps(x, 0xAAAA, x, _mm512_moveldup_ps(x));
  x = _mm512_mask_add_ps(x, 0xCCCC, x, _mm512_permute_ps(x, 0x55));
  x = _mm512_mask_add_ps(x, 0xF0F0, x, _mm512_permute_ps(_mm512_shuffle_f32x4(x, x, 0xA0), 0xFF));
  return _mm512_mask_add_ps(x, 0xFF00, x, _mm512_permutexvar_ps(_mm512_set1_epi32(7), x));
}

// Half a line. Shuffles of 256 bits run on two ports where those of 512 have one.
using Half = __m256;

inline Half sums_to(Half x) {
  x = _mm256_mask_add_ps(x, 0xAA, x, _mm256_moveldup_ps(x));
  x = _mm256_mask_add_ps(x, 0xCC, x, _mm256_permute_ps(x, 0x55));
  return _mm256_mask_add_ps(x, 0xF0, x, _mm256_permutexvar_ps(_mm256_set1_epi32(3), x));
}

inline Half last(Half x) { return _mm256_permutexvar_ps(_mm256_set1_epi32(7), x); }

// Writes what is before each number of a line, and returns what is in all of it. Behind the last positive number
// nothing is ever found: a mass that rounding has carried beyond them all belongs to that one.
inline float sums_before(const float* line, float* before) {
  const Half low = sums_to(_mm256_load_ps(line)), high = sums_to(_mm256_load_ps(line + 8));
  const Half upper = _mm256_add_ps(high, last(low)), all = last(upper), never = _mm256_set1_ps(kNever);
  // the total is reached with the last positive number: what follows it has the total before it
  const Half first = _mm256_mask_mov_ps(never, _mm256_cmp_ps_mask(low, all, _CMP_LT_OQ), low);
  const Half second = _mm256_mask_mov_ps(never, _mm256_cmp_ps_mask(upper, all, _CMP_LT_OQ), upper);
  before[0] = 0.0f;
  _mm256_storeu_ps(before + 1, first);
  _mm256_mask_storeu_ps(before + 9, 0x7F, second);
  return _mm256_cvtss_f32(all);
}

inline float total(const float* line) {
  const Half pairs = _mm256_add_ps(_mm256_load_ps(line), _mm256_load_ps(line + 8));
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

// The least of 16 numbers that are not negative; as integers their bits have the same order.
inline float least_of(__m256i low, __m256i high, uint32_t plus) {
  const __m256i pairs = _mm256_min_epu32(low, high);
  __m128i x = _mm_min_epu32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  x = _mm_min_epu32(x, _mm_shuffle_epi32(x, 0x4E));
  x = _mm_min_epu32(x, _mm_shuffle_epi32(x, 0xB1));
  const uint32_t bits = static_cast<uint32_t>(_mm_cvtsi128_si32(x)) + plus;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

inline float least(const float* line) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(line);
  return least_of(_mm256_load_si256(halves), _mm256_load_si256(halves + 1), 0);
}

// Zero less one is more than any; so nothing positive at all gives zero, which is infinity here.
inline float least_positive(const float* line) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(line);
  const __m256i one = _mm256_set1_epi32(1);
  const float found = least_of(_mm256_sub_epi32(_mm256_load_si256(halves), one),
                               _mm256_sub_epi32(_mm256_load_si256(halves + 1), one), 1);
  return found > 0.0f ? found : kNever;
}

#else

// Writes what is before each number of a line, and returns what is in all of it. Behind the last positive number
// nothing is ever found: a mass that rounding has carried beyond them all belongs to that one.
inline float sums_before(const float* line, float* before) {
  alignas(64) float sum[kLine];
  sums_to(line, sum);
  before[0] = 0.0f;
  // the total is reached with the last positive number: what follows it has the total before it
  for (int i = 1; i < kLine; ++i) before[i] = sum[i - 1] < sum[kLine - 1] ? sum[i - 1] : kNever;
  return sum[kLine - 1];
}

inline float total(const float* line) {
  float sums[kLine];
  std::memcpy(sums, line, sizeof sums);
  for (int width = kLine / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

inline float least_positive(const float* line) {
  float least = std::numeric_limits<float>::infinity();
  for (int i = 0; i < kLine; ++i) {
    const float x = line[i] > 0.0f ? line[i] : std::numeric_limits<float>::infinity();
    least = x < least ? x : least;
  }
  return least;
}

inline float least(const float* line) {
  float x = line[0];
  for (int i = 1; i < kLine; ++i) x = line[i] < x ? line[i] : x;
  return x;
}

#endif

// -- set ----------------------------------------------------------------------------------------------------

// One line of a level: what is before each of its numbers, and its total and least one level up.
inline void refresh(const Tree& tree, int level, int64_t line) {
  const float* numbers = tree.raw[level] + line * kLine;
  tree.raw[level + 1][line] =
      level > 0 ? sums_before(numbers, tree.before[level] + line * kLine) : total(numbers);
  if (tree.has_minimum)
    tree.least[level + 1][line] = level > 0 ? least(tree.least[level] + line * kLine) : least_positive(numbers);
}

inline void soon(const float* place) {
#if defined(__GNUC__)
  __builtin_prefetch(place, 1);
#else
  (void)place;
#endif
}

void set(const Tree& tree, const int64_t* index, const float* priority, int64_t count) {
  constexpr int64_t kSoon = 24;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kSoon < count) soon(tree.raw[0] + index[i + kSoon]);
    tree.raw[0][index[i]] = priority[i];
  }
  // level by level for the whole batch: a line that was just written is not read while it is on its way
  for (int level = 0; level <= tree.top; ++level) {
    const int shift = 4 * level + 4;
    if (tree.lines[level] <= count) {
      for (int64_t line = 0; line < tree.lines[level]; ++line) refresh(tree, level, line);
      continue;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (i + kSoon < count) {
        const int64_t line = index[i + kSoon] >> shift;
        soon(tree.raw[level + 1] + line);
        if (tree.has_minimum) soon(tree.least[level + 1] + line);
        if (level > 0) soon(tree.before[level] + line * kLine);
      }
      refresh(tree, level, index[i] >> shift);
    }
  }
}

// -- find ---------------------------------------------------------------------------------------------------

// The greatest float that is not above x, for x >= 0: `sum <= x` is then the same question in float.
inline float not_above(double x) {
  const float nearest = static_cast<float>(x);
  int32_t bits;
  std::memcpy(&bits, &nearest, sizeof bits);
  bits -= static_cast<double>(nearest) > x;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

#ifdef __AVX512F__

inline void all_not_above(const double* x, float* found) {
  for (int i = 0; i < kGroup; i += 8)
    _mm256_store_ps(found + i, _mm512_cvt_roundpd_ps(_mm512_loadu_pd(x + i), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
}

// How many of a line's sums are not above x.
inline int count_not_above(const float* sums, float x) {
  const unsigned mask = _mm512_cmp_ps_mask(load(sums), _mm512_set1_ps(x), _CMP_NGT_UQ);
  // one bit more, or the compiler counts 16 bits into half a register, and each query waits for the one before
  return __builtin_popcount(mask | 0x10000u) - 1;
}

// The number of a line of leaves whose interval holds x; the last positive one if x is beyond them all.
inline int leaf(const float* line, float x) {
  const Line p = load(line);
  const unsigned positive = _mm512_cmp_ps_mask(p, _mm512_setzero_ps(), _CMP_GT_OQ);
  const unsigned fitting = positive & _mm512_cmp_ps_mask(_mm512_set1_ps(x), sums_to(p), _CMP_LT_OQ);
  return fitting ? __builtin_ctz(fitting) : 31 - __builtin_clz(positive | 1u);
}

#else

inline void all_not_above(const double* x, float* found) {
  for (int i = 0; i < kGroup; ++i) found[i] = not_above(x[i]);
}

#ifdef __SSE2__

// How many of 16 sums, which do not fall, are not above x.
inline int count_not_above(const float* sums, float x) {
  const __m128 wide = _mm_set1_ps(x);
  const auto above = [&](int k) { return _mm_castps_si128(_mm_cmpgt_ps(_mm_load_ps(sums + 4 * k), wide)); };
  const __m128i halves = _mm_packs_epi16(_mm_packs_epi32(above(0), above(1)), _mm_packs_epi32(above(2), above(3)));
  return __builtin_ctz(static_cast<unsigned>(_mm_movemask_epi8(halves)) | 0x10000u);
}

#else

inline int count_not_above(const float* sums, float x) {
  int count = 0;
  for (int i = 0; i < kLine; ++i) count += !(sums[i] > x);
  return count;
}

#endif

inline int leaf(const float* line, float x) {
  alignas(64) float sum[kLine];
  sums_to(line, sum);
  const int found = count_not_above(sum, x);
  if (found < kLine) return found;  // sums stand still where there is nothing: this one has something
  int last = kLine - 1;
  while (last > 0 && !(line[last] > 0.0f)) --last;
  return last;
}

#endif

// A group of queries goes down side by side, so that their cache misses overlap, and without a branch on what
// is found, which would be mispredicted half of the time.
inline void find_group(const Tree& tree, const double* mass, int64_t* index) {
  alignas(64) double rest[kGroup];
  alignas(64) float bound[kGroup];
  int64_t line[kGroup] = {};
  std::memcpy(rest, mass, sizeof rest);
  for (int level = tree.top; level > 0; --level) {
    const float* before = tree.before[level];
    const float* next = level > 1 ? tree.before[level - 1] : tree.raw[0];
    all_not_above(rest, bound);
    for (int i = 0; i < kGroup; ++i) {
      const float* sums = before + line[i] * kLine;
      // a writer may change a line between two looks at it: what is found is then another leaf, but a leaf
      const int count = count_not_above(sums, bound[i]), child = count > 0 ? count - 1 : 0;
      const double left = rest[i] - static_cast<double>(sums[child]);
      rest[i] = left > 0.0 ? left : 0.0;
      line[i] = line[i] * kLine + child;
#if defined(__GNUC__)
      __builtin_prefetch(next + line[i] * kLine);
#endif
    }
  }
  all_not_above(rest, bound);
  for (int i = 0; i < kGroup; ++i) index[i] = line[i] * kLine + leaf(tree.raw[0] + line[i] * kLine, bound[i]);
}

void find(const Tree& tree, const double* mass, int64_t count, int64_t* index) {
  int64_t done = 0;
  for (; done + kGroup <= count; done += kGroup) find_group(tree, mass + done, index + done);
  if (done < count) {
    double some[kGroup] = {};
    int64_t found[kGroup];
    std::memcpy(some, mass + done, sizeof(double) * static_cast<std::size_t>(count - done));
    find_group(tree, some, found);
    std::memcpy(index + done, found, sizeof(int64_t) * static_cast<std::size_t>(count - done));
  }
}

// -- weights ------------------------------------------------------------------------------------------------

// 2 ** x and log2(x) for float, relative error below 3e-7, in a form that compilers turn into vector code.
inline float log2_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int32_t offset = (bits - 0x3f3504f3) >> 23;  // so that the mantissa lies in [sqrt(1/2), sqrt(2))
  const int32_t rest = bits - (offset << 23);
  float m;
  std::memcpy(&m, &rest, sizeof m);
  const float z = (m - 1.0f) / (m + 1.0f);  // log2(m) = 2 / ln 2 (z + z^3 / 3 + z^5 / 5 + ..)
  const float zz = z * z;
  const float series = ((0.3205989f * zz + 0.4121985f) * zz + 0.5770780f) * zz + 0.9617967f;
  return static_cast<float>(offset) + z * (2.8853900818f + zz * series);
}

inline float exp2_of(float x) {
  x = x < -126.0f ? -126.0f : (x > 126.0f ? 126.0f : x);
  const float shifted = x + 12582912.0f;  // 1.5 * 2**23 rounds to the nearest whole number
  int32_t whole;
  std::memcpy(&whole, &shifted, sizeof whole);
  const float f = x - (shifted - 12582912.0f);  // in [-1/2, 1/2]
  float p = 1.5404e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &p, sizeof bits);
  bits += static_cast<int32_t>(static_cast<uint32_t>(whole) << 23);
  std::memcpy(&p, &bits, sizeof p);
  return p;
}

float power(const float* error, int64_t count, float alpha, float epsilon, float* priority) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = std::fabs(error[i]) + epsilon;
    const float p = exp2_of(alpha * log2_of(x));
    // what is not finite must be seen by whoever looks at it next; zero stays zero
    priority[i] = x > 0.0f && x <= std::numeric_limits<float>::max() ? p : x;
  }
  // numbers without a sign are in the order of their bits, what is not finite last; compilers know how to
  // look for the greatest of integers side by side
  int32_t greatest = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, priority + i, sizeof bits);
    greatest = bits > greatest ? bits : greatest;
  }
  float found;
  std::memcpy(&found, &greatest, sizeof found);
  return found;
}

// -- draws --------------------------------------------------------------------------------------------------

// SplitMix64 (Steele et al. 2014) of a counter: 53 random bits in [0, 1) for each number of a stream.
inline double uniform(uint64_t key, uint64_t number) {
  uint64_t z = key + number * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1p-53;
}

bool sample(const Tree& tree, uint64_t* state, int64_t count, float beta, int64_t* index, float* weight,
            bool stratified) {
  constexpr int64_t kChunk = 1024;
  const double total = tree.total();
  if (!(total > 0.0 && total <= static_cast<double>(std::numeric_limits<float>::max()))) return false;
  const float scale = tree.has_minimum ? 1.0f / tree.minimum() : static_cast<float>(tree.capacity / total);
  const uint64_t key = state[0], start = state[1];
  double mass[kChunk];
  for (int64_t done = 0; done < count; done += kChunk) {
    const int64_t some = count - done < kChunk ? count - done : kChunk;
    const uint64_t first = start + static_cast<uint64_t>(done);
    if (stratified) {
      const double width = total / static_cast<double>(count);
      for (int64_t i = 0; i < some; ++i)
        mass[i] = (static_cast<double>(done + i) + uniform(key, first + static_cast<uint64_t>(i))) * width;
    } else {
      for (int64_t i = 0; i < some; ++i) mass[i] = uniform(key, first + static_cast<uint64_t>(i)) * total;
    }
    find(tree, mass, some, index + done);
    float drawn[kChunk];
    for (int64_t i = 0; i < some; ++i) drawn[i] = tree.raw[0][index[done + i]];
    for (int64_t i = 0; i < some; ++i) weight[done + i] = exp2_of(-beta * log2_of(drawn[i] * scale));
  }
  state[1] = start + static_cast<uint64_t>(count);
  return true;
}

}  // namespace

const Kernels MURMURATE_KERNELS = {MURMURATE_NAME, find, set, power, sample};

}  // namespace murmurate
