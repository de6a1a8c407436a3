// Built once for each instruction set, with different flags; MURMURATE_KERNELS names the table that this build fills.
#include "kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "lines.hpp"
#include "threads.hpp"

namespace murmurate {
namespace {

constexpr int64_t kFarLeaves = 1 << 22;  // from so many leaves (16 MB) on, they do not fit into the caches
constexpr int64_t kChunk = 1024;  // numbers of a batch that one thread takes at a time
constexpr int kGroup = 64;  // so many queries, or twice as many, are searched together, so that cache misses overlap
// Number of queries from which on a second thread saves more time than waking it costs: 150 microseconds of work.
constexpr int64_t kThreadedBatch = 16384;

// -- set ----------------------------------------------------------------------------------------------------

// Recomputes one line of a level: the sums before its numbers, and its total and least number one level up.
inline void refresh(const Tree& tree, int level, int64_t line) {
  const float* numbers = tree.raw[level] + line * kLine;
  tree.raw[level + 1][line] =
      level > 0 ? sums_before(numbers, tree.before[level] + line * kLine) : total(numbers);
  tree.least[level + 1][line] = level > 0 ? least(tree.least[level] + line * kLine) : least_positive(numbers);
}

inline void prefetch_write(const float* place) {
#if defined(__GNUC__)
  __builtin_prefetch(place, 1);
#else
  (void)place;
#endif
}

void set(const Tree& tree, const int64_t* index, const float* priority, int64_t count) {
  constexpr int64_t kAhead = 24;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) prefetch_write(tree.raw[0] + index[i + kAhead]);
    tree.raw[0][index[i]] = priority[i];
  }
  // level by level for the whole batch, so that a line is not read right after it was written, which would stall
  for (int level = 0; level <= tree.top; ++level) {
    const int shift = 4 * level + 4;
    if (tree.lines[level] <= count) {
      for (int64_t line = 0; line < tree.lines[level]; ++line) refresh(tree, level, line);
      continue;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        const int64_t line = index[i + kAhead] >> shift;
        prefetch_write(tree.raw[level + 1] + line);
        prefetch_write(tree.least[level + 1] + line);
        if (level > 0) prefetch_write(tree.before[level] + line * kLine);
      }
      refresh(tree, level, index[i] >> shift);
    }
  }
}

// -- find ---------------------------------------------------------------------------------------------------

// The greatest float that is not above x, for x >= 0, so that floats can be compared with x in float.
inline float rounded_down(double x) {
  const float nearest = static_cast<float>(x);
  int32_t bits;
  std::memcpy(&bits, &nearest, sizeof bits);
  bits -= static_cast<double>(nearest) > x;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline double not_negative(double x) {
#ifdef __SSE2__
  return _mm_cvtsd_f64(_mm_max_sd(_mm_set_sd(x), _mm_setzero_pd()));  // else compilers make a comparison and a blend
#else
  return x > 0.0 ? x : 0.0;
#endif
}

#ifdef __AVX512F__

template <int kCount>
inline void all_rounded_down(const double* x, float* out) {
  for (int i = 0; i < kCount; i += 8)
    _mm256_store_ps(out + i, _mm512_cvt_roundpd_ps(_mm512_loadu_pd(x + i), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
}

// How many of a line's sums are not above x.
inline int count_not_above(const float* sums, float x) {
  const unsigned mask = _mm512_cmp_ps_mask(load(sums), _mm512_set1_ps(x), _CMP_NGT_UQ);
  // An additional bit: of 16 bits the compiler writes the count to half a register, so that each query would wait for
  // the query before it.
  return __builtin_popcount(mask | 0x10000u) - 1;
}

// The position in a line of leaves of the leaf whose interval holds x; that of the last positive leaf if x is beyond
// all.
inline int leaf(const float* line, float x) {
  const Line p = load(line);
  const unsigned fitting = _mm512_cmp_ps_mask(_mm512_set1_ps(x), prefix_sums(p), _CMP_LT_OQ);
  if (fitting) return __builtin_ctz(fitting);  // this leaf is positive, as sums do not grow at zeros
  return 31 - __builtin_clz(_mm512_cmp_ps_mask(p, _mm512_setzero_ps(), _CMP_GT_OQ) | 1u);
}

// The first step of all queries: the only line of the top level stays in a register, where 16 queries bisect it at
// once.
template <int kCount>
inline void find_in_root(const float* before, double* rest, int64_t* child) {
  const Line sums = load(before);
  for (int i = 0; i < kCount; i += kLine) {
    double* low = rest + i;
    double* high = low + 8;
    constexpr int kDown = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    const Line x = _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvt_roundpd_ps(_mm512_load_pd(low), kDown)),
                                      _mm512_cvt_roundpd_ps(_mm512_load_pd(high), kDown), 1);
    __m512i position = _mm512_setzero_si512();
    for (int half = kLine / 2; half > 0; half /= 2) {
      const __m512i further = _mm512_or_si512(position, _mm512_set1_epi32(half));
      const Line sum = _mm512_permutexvar_ps(further, sums);
      position = _mm512_mask_mov_epi32(position, _mm512_cmp_ps_mask(sum, x, _CMP_LE_OQ), further);
    }
    const Line sum_before = _mm512_permutexvar_ps(position, sums);
    const auto subtract = [](double* x, __m256 by) {
      const __m512d left = _mm512_sub_pd(_mm512_load_pd(x), _mm512_cvtps_pd(by));
      _mm512_store_pd(x, _mm512_max_pd(left, _mm512_setzero_pd()));
    };
    subtract(low, _mm512_castps512_ps256(sum_before));
    subtract(high, _mm512_extractf32x8_ps(sum_before, 1));
    _mm512_store_si512(child + i, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(position)));
    _mm512_store_si512(child + i + 8, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(position, 1)));
  }
}

#else

template <int kCount>
inline void all_rounded_down(const double* x, float* out) {
  for (int i = 0; i < kCount; ++i) out[i] = rounded_down(x[i]);
}

#ifdef __SSE2__

// How many of 16 non-decreasing sums are not above x.
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
  prefix_sums(line, sum);
  const int position = count_not_above(sum, x);
  if (position < kLine) return position;  // this leaf is positive, as sums do not grow at zeros
  int last = kLine - 1;
  while (last > 0 && !(line[last] > 0.0f)) --last;
  return last;
}

#endif

// Goes from a line of a level to the line of the level below that holds the leaf.
inline void descend(const Tree& tree, int level, float bound, double& rest, int64_t& line) {
  const float* sums = tree.before[level] + line * kLine;
  // The sum before the first number is 0, so the count is at least 1. Another process may change the line meanwhile:
  // another leaf is found then, but still one of the tree.
  const int child = count_not_above(sums, bound) - 1;
  rest = not_negative(rest - static_cast<double>(sums[child]));
  line = line * kLine + child;
#if defined(__GNUC__)
  __builtin_prefetch((level > 1 ? tree.before[level - 1] : tree.raw[0]) + line * kLine);
#endif
}

// A group of queries goes down together, so that their cache misses overlap, and without a branch on the child, which
// would be mispredicted half of the time.
template <int kCount>
inline void find_group(const Tree& tree, const double* mass, int64_t* index) {
  alignas(64) double rest[kCount];
  alignas(64) float bound[kCount];
  alignas(64) int64_t line[kCount] = {};
  std::memcpy(rest, mass, sizeof rest);
  int level = tree.top;
#ifdef __AVX512F__
  find_in_root<kCount>(tree.before[level], rest, line);
  --level;
#endif
  for (; level > 0; --level) {
    all_rounded_down<kCount>(rest, bound);
    for (int i = 0; i < kCount; ++i) descend(tree, level, bound[i], rest[i], line[i]);
  }
  all_rounded_down<kCount>(rest, bound);
  for (int i = 0; i < kCount; ++i) index[i] = line[i] * kLine + leaf(tree.raw[0] + line[i] * kLine, bound[i]);
}

// Several groups follow one another a level apart: while one group's lines of leaves are fetched from memory, the next
// groups compare with sums that are in the cache. This is faster only if the leaves are not in the cache.
template <int kGroups>
inline void find_staggered(const Tree& tree, const double* mass, int64_t* index) {
  struct Group {
    alignas(64) double rest[kGroup];
    alignas(64) float bound[kGroup];
    alignas(64) int64_t line[kGroup];
    int level;
  };
  Group groups[kGroups];
  for (int wave = 0; wave <= tree.top + kGroups - 1; ++wave) {
    Group* walking[kGroups];
    int count = 0;
    Group* arriving = nullptr;
    int64_t* arriving_index = nullptr;
    for (int g = 0; g < kGroups; ++g) {
      Group& group = groups[g];
      group.level = tree.top - (wave - g);
      if (group.level > tree.top || group.level < 0) continue;
      if (group.level == tree.top) {
        std::memcpy(group.rest, mass + g * kGroup, sizeof group.rest);
        std::memset(group.line, 0, sizeof group.line);
#ifdef __AVX512F__
        find_in_root<kGroup>(tree.before[tree.top], group.rest, group.line);
        continue;
#endif
      }
      all_rounded_down<kGroup>(group.rest, group.bound);
      if (group.level > 0)
        walking[count++] = &group;
      else
        arriving = &group, arriving_index = index + g * kGroup;
    }
    for (int i = 0; i < kGroup; ++i) {
      for (int k = 0; k < count; ++k) {
        Group& group = *walking[k];
        descend(tree, group.level, group.bound[i], group.rest[i], group.line[i]);
      }
      if (arriving) {
        const int64_t line = arriving->line[i];
        arriving_index[i] = line * kLine + leaf(tree.raw[0] + line * kLine, arriving->bound[i]);
      }
    }
  }
}

void find_chunk(const Tree& tree, const double* mass, int64_t count, int64_t* index) {
  int64_t done = 0;
  if (tree.capacity >= kFarLeaves)
    for (; done + 4 * kGroup <= count; done += 4 * kGroup) find_staggered<4>(tree, mass + done, index + done);
  for (; done + 2 * kGroup <= count; done += 2 * kGroup) find_group<2 * kGroup>(tree, mass + done, index + done);
  for (; done + kGroup <= count; done += kGroup) find_group<kGroup>(tree, mass + done, index + done);
  if (done < count) {
    double padded_mass[kGroup] = {};
    int64_t padded_index[kGroup];
    std::memcpy(padded_mass, mass + done, sizeof(double) * static_cast<std::size_t>(count - done));
    find_group<kGroup>(tree, padded_mass, padded_index);
    std::memcpy(index + done, padded_index, sizeof(int64_t) * static_cast<std::size_t>(count - done));
  }
}

// Calls work(first number, numbers) for each chunk of a batch.
template <typename Work>
void in_chunks(int64_t count, int64_t threads, const Work& work) {
  in_parts(count >= kThreadedBatch ? threads : 1, (count + kChunk - 1) / kChunk, [&](int64_t chunk) {
    const int64_t first = chunk * kChunk;
    work(first, count - first < kChunk ? count - first : kChunk);
  });
}

void find(const Tree& tree, const double* mass, int64_t count, int64_t* index, int64_t threads) {
  in_chunks(count, threads,
            [&](int64_t first, int64_t numbers) { find_chunk(tree, mass + first, numbers, index + first); });
}

// -- weights ------------------------------------------------------------------------------------------------

// 2 ** x and log2(x) for float, relative error below 3e-7, in a form that compilers turn into vector code.
inline float log2_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int32_t offset = (bits - 0x3f3504f3) >> 23;  // makes the mantissa lie in [sqrt(1/2), sqrt(2))
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
    // what is not finite is kept, for the caller to see; zero stays zero, but 0^0 is 1
    priority[i] = x > 0.0f && x <= std::numeric_limits<float>::max() ? p : x == 0.0f && alpha == 0.0f ? 1.0f : x;
  }
  // Non-negative floats are in the order of their bits, with what is not finite last; and compilers vectorise the
  // search for the greatest integer.
  int32_t greatest = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, priority + i, sizeof bits);
    greatest = bits > greatest ? bits : greatest;
  }
  float result;
  std::memcpy(&result, &greatest, sizeof result);
  return result;
}

// -- draws --------------------------------------------------------------------------------------------------

// SplitMix64 (Steele et al. 2014) of a counter: 53 random bits in [0, 1) for each `number`.
inline double uniform(uint64_t key, uint64_t number) {
  uint64_t z = key + number * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1p-53;
}

bool sample(const Tree& tree, uint64_t* state, int64_t count, float beta, int64_t* index, float* weight,
            bool stratified, int64_t threads) {
  const double total = tree.total();
  if (!(total > 0.0 && total <= static_cast<double>(std::numeric_limits<float>::max()))) return false;
  // the inverse of a subnormal number would be infinite
  const float scale = std::min(1.0f / tree.minimum(), std::numeric_limits<float>::max());
  const uint64_t key = state[0], start = state[1];
  in_chunks(count, threads, [&](int64_t offset, int64_t numbers) {
    double mass[kChunk];
    const uint64_t first = start + static_cast<uint64_t>(offset);
    if (stratified) {
      const double width = total / static_cast<double>(count);
      for (int64_t i = 0; i < numbers; ++i)
        mass[i] = (static_cast<double>(offset + i) + uniform(key, first + static_cast<uint64_t>(i))) * width;
    } else {
      for (int64_t i = 0; i < numbers; ++i) mass[i] = uniform(key, first + static_cast<uint64_t>(i)) * total;
    }
    find_chunk(tree, mass, numbers, index + offset);
    float drawn[kChunk];
    for (int64_t i = 0; i < numbers; ++i) drawn[i] = tree.raw[0][index[offset + i]];
    // another process may set a leaf to 0 after it was found: its weight is limited to that of the least leaf
    for (int64_t i = 0; i < numbers; ++i)
      weight[offset + i] = exp2_of(-beta * log2_of(std::max(drawn[i] * scale, 1.0f)));
  });
  state[1] = start + static_cast<uint64_t>(count);
  return true;
}

}  // namespace

const Kernels MURMURATE_KERNELS = {MURMURATE_NAME, find, set, power, sample};

}  // namespace murmurate
