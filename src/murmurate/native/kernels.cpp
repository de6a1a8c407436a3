// Built three times, with different flags; MURMURATE_KERNELS names the table that this build fills.
#include "kernels.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace murmurate {
namespace {

constexpr double kNowhere = 1e300;  // a mass that no leaf has room for
constexpr int kGroup = 64;  // queries that are searched side by side, so that their cache misses overlap

// -- one query, exactly -----------------------------------------------------------------------------------

// The child of a line that holds `mass`, and what is left of the mass: the last positive one if rounding has
// carried it beyond all. A positive total has a positive child, so this ends at a positive leaf.
inline int child(const float* line, double& mass) {
  int last = 0;
  double before = 0.0, sum = 0.0;
  for (int i = 0; i < kLine; ++i) {
    if (!(line[i] > 0.0f)) continue;
    last = i;
    before = sum;
    sum += line[i];
    if (mass < sum) break;
  }
  mass -= before;
  return last;
}

int64_t find_slowly(const Tree& tree, double mass) {
  int64_t line = 0;
  for (int level = tree.top; level > 0; --level) line = line * kLine + child(tree.raw[level] + line * kLine, mass);
  return line * kLine + child(tree.raw[0] + line * kLine, mass);
}

// -- totals -----------------------------------------------------------------------------------------------

// The heap of left sums over a line (see kernels.hpp); every total is summed in this order, so a line's lane 0
// and the number in the level above are the same bits.
inline void left_sums(const float* line, float* out) {
  float pair[8], quad[4], half[2];
  for (int i = 0; i < 8; ++i) {
    out[8 + i] = line[2 * i];
    pair[i] = line[2 * i] + line[2 * i + 1];
  }
  for (int i = 0; i < 4; ++i) {
    out[4 + i] = pair[2 * i];
    quad[i] = pair[2 * i] + pair[2 * i + 1];
  }
  for (int i = 0; i < 2; ++i) {
    out[2 + i] = quad[2 * i];
    half[i] = quad[2 * i] + quad[2 * i + 1];
  }
  out[1] = half[0];
  out[0] = half[0] + half[1];
}

inline float total(const float* line) {
  float sums[kLine];
  std::memcpy(sums, line, sizeof sums);
  for (int width = kLine / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
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

#ifdef __AVX512F__

struct Sums {
  __m512 pair, quad, half, whole;  // in every lane the sum of its group of 2, 4, 8, 16
};

inline Sums sums_of(__m512 x) {
  Sums s;
  s.pair = _mm512_add_ps(x, _mm512_permute_ps(x, 0xB1));
  s.quad = _mm512_add_ps(s.pair, _mm512_permute_ps(s.pair, 0x4E));
  s.half = _mm512_add_ps(s.quad, _mm512_shuffle_f32x4(s.quad, s.quad, 0xB1));
  s.whole = _mm512_add_ps(s.half, _mm512_shuffle_f32x4(s.half, s.half, 0x4E));
  return s;
}

inline void left_sums_512(const float* line, float* out) {
  const __m512 x = _mm512_load_ps(line);
  const Sums s = sums_of(x);
  // lanes 8-15: x[0, 2, ..]; 4-7: pair[0, 4, 8, 12]; 2-3: quad[0, 8]; 1: half[0]; 0: whole
  const __m512i from = _mm512_setr_epi32(0, 0, 0, 0, 16, 20, 24, 28, 0, 2, 4, 6, 8, 10, 12, 14);
  const __m512 low = _mm512_permutex2var_ps(x, from, s.pair);
  const __m512i top = _mm512_setr_epi32(16, 16, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  __m512 high = _mm512_permutex2var_ps(s.quad, top, s.half);
  high = _mm512_mask_blend_ps(0x1, high, s.whole);
  _mm512_store_ps(out, _mm512_mask_blend_ps(0xF, low, high));
}

inline float total_512(const float* line) { return _mm512_cvtss_f32(sums_of(_mm512_load_ps(line)).whole); }

inline float least_positive_512(const float* line) {
  const __m512 x = _mm512_load_ps(line);
  const __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
  const __m512 limit = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  return _mm512_reduce_min_ps(_mm512_mask_mov_ps(limit, positive, x));
}

#define LEFT_SUMS left_sums_512
#define TOTAL total_512
#define LEAST_POSITIVE least_positive_512
#else
#define LEFT_SUMS left_sums
#define TOTAL total
#define LEAST_POSITIVE least_positive
#endif

// -- set ----------------------------------------------------------------------------------------------------

inline void refresh(const Tree& tree, int level, int64_t line) {
  const float* below = tree.raw[level - 1] + line * kLine;
  tree.raw[level][line] = TOTAL(below);
  if (tree.has_minimum) {
    float* least = tree.least[level];
    if (level == 1) {
      least[line] = LEAST_POSITIVE(below);
    } else {
      const float* rest = tree.least[level - 1] + line * kLine;
      float x = rest[0];
      for (int i = 1; i < kLine; ++i) x = rest[i] < x ? rest[i] : x;
      least[line] = x;
    }
  }
}

void set(const Tree& tree, const int64_t* index, const float* priority, int64_t count) {
  for (int64_t i = 0; i < count; ++i) tree.raw[0][index[i]] = priority[i];
  for (int level = 1; level <= tree.top; ++level) {
    const int shift = 4 * level;
    const int64_t below = tree.lines[level - 1];  // lines whose totals are this level's numbers
    if (below <= count) {
      for (int64_t line = 0; line < below; ++line) refresh(tree, level, line);
      for (int64_t line = 0; line < tree.lines[level]; ++line)
        LEFT_SUMS(tree.raw[level] + line * kLine, tree.left[level] + line * kLine);
    } else {
      // level by level for the whole batch: a line that was just written is not read while it is on its way
      for (int64_t i = 0; i < count; ++i) refresh(tree, level, index[i] >> shift);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t line = index[i] >> (shift + 4);
        LEFT_SUMS(tree.raw[level] + line * kLine, tree.left[level] + line * kLine);
      }
    }
  }
}

// -- find ---------------------------------------------------------------------------------------------------

#ifdef __AVX512F__

constexpr int kVectors = kGroup / kLine;

// 64 queries: one gather a binary level for 16 of them, the four vectors in turn to hide its latency.
inline int64_t find_group(const Tree& tree, const double* mass, int64_t* index) {
  __m512d low[kVectors], high[kVectors];
  __m512i line[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    low[v] = _mm512_loadu_pd(mass + v * kLine);
    high[v] = _mm512_loadu_pd(mass + v * kLine + 8);
    line[v] = _mm512_setzero_si512();
  }
  const __m512i one = _mm512_set1_epi32(1);
  const __m512d nowhere = _mm512_set1_pd(kNowhere);
  for (int level = tree.top; level > 0; --level) {
    const float* left = tree.left[level];
    __m512i lane[kVectors], base[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      lane[v] = one;
      base[v] = _mm512_slli_epi32(line[v], 4);
    }
    for (int step = 0; step < 4; ++step) {
      for (int v = 0; v < kVectors; ++v) {
        const __m512 sum = _mm512_i32gather_ps(_mm512_add_epi32(base[v], lane[v]), left, 4);
        const __m512d sum_low = _mm512_cvtps_pd(_mm512_castps512_ps256(sum));
        const __m512d sum_high = _mm512_cvtps_pd(
            _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sum), 1)));
        const __mmask8 right_low = _mm512_cmp_pd_mask(low[v], sum_low, _CMP_GE_OQ);
        const __mmask8 right_high = _mm512_cmp_pd_mask(high[v], sum_high, _CMP_GE_OQ);
        low[v] = _mm512_mask_sub_pd(low[v], right_low, low[v], sum_low);
        high[v] = _mm512_mask_sub_pd(high[v], right_high, high[v], sum_high);
        const __mmask16 right = static_cast<__mmask16>(right_low | (static_cast<unsigned>(right_high) << 8));
        lane[v] = _mm512_add_epi32(lane[v], lane[v]);
        lane[v] = _mm512_mask_add_epi32(lane[v], right, lane[v], one);
      }
    }
    const __m512i first = _mm512_set1_epi32(kLine);
    // rounding may carry a mass to a child that has nothing, or is not there at all
    const __m512i last = _mm512_set1_epi32(static_cast<int32_t>(tree.lines[level - 1] - 1));
    for (int v = 0; v < kVectors; ++v) {
      const __m512i child = _mm512_add_epi32(base[v], _mm512_sub_epi32(lane[v], first));
      const __mmask16 lost = _mm512_cmpgt_epi32_mask(child, last);
      line[v] = _mm512_min_epi32(child, last);
      low[v] = _mm512_mask_mov_pd(low[v], static_cast<__mmask8>(lost), nowhere);
      high[v] = _mm512_mask_mov_pd(high[v], static_cast<__mmask8>(lost >> 8), nowhere);
    }
    if (tree.lines[level - 1] > 4096) {  // beyond the caches: ask for the next lines before they are needed
      alignas(64) int32_t next[kLine];
      const float* there = level > 1 ? tree.left[level - 1] : tree.raw[0];
      for (int v = 0; v < kVectors; ++v) {
        _mm512_store_si512(next, line[v]);
        for (int i = 0; i < kLine; ++i)
          _mm_prefetch(reinterpret_cast<const char*>(there + static_cast<int64_t>(next[i]) * kLine), _MM_HINT_T0);
      }
    }
  }
  alignas(64) int32_t at[kGroup];
  alignas(64) float rest[kGroup];
  for (int v = 0; v < kVectors; ++v) {
    _mm512_store_si512(at + v * kLine, line[v]);
    _mm256_store_ps(rest + v * kLine, _mm512_cvtpd_ps(low[v]));
    _mm256_store_ps(rest + v * kLine + 8, _mm512_cvtpd_ps(high[v]));
  }
  int64_t slow = 0;
  for (int i = 0; i < kGroup; ++i) {
    const int64_t start = static_cast<int64_t>(at[i]) * kLine;
    const __m512 x = _mm512_load_ps(tree.raw[0] + start);
    // sums of all up to each lane
    __m512 sum = x;
    const __m512i zero = _mm512_setzero_si512();
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_alignr_epi32(_mm512_castps_si512(sum), zero, 15)));
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_alignr_epi32(_mm512_castps_si512(sum), zero, 14)));
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_alignr_epi32(_mm512_castps_si512(sum), zero, 12)));
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_alignr_epi32(_mm512_castps_si512(sum), zero, 8)));
    const unsigned positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
    const unsigned beyond = _mm512_cmp_ps_mask(_mm512_set1_ps(rest[i]), sum, _CMP_LT_OQ);
    const unsigned fitting = positive & beyond;
    if (fitting) {
      index[i] = start + __builtin_ctz(fitting);
    } else {  // rounding has carried the mass beyond what there is
      index[i] = find_slowly(tree, mass[i]);
      ++slow;
    }
  }
  return slow;
}

#else

// Without a branch on what is found: it would be mispredicted half of the time.
inline int64_t find_group(const Tree& tree, const double* mass, int64_t* index) {
  double rest[kGroup];
  int64_t line[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    rest[i] = mass[i];
    line[i] = 0;
  }
  for (int level = tree.top; level > 0; --level) {
    const float* next = level > 1 ? tree.left[level - 1] : tree.raw[0];
    const int64_t last = tree.lines[level - 1] - 1;  // rounding may carry a mass to a child that is not there
    for (int i = 0; i < kGroup; ++i) {
      const float* sums = tree.left[level] + line[i] * kLine;
      double left_over = rest[i];
      uint64_t lane = 1;
      for (int step = 0; step < 4; ++step) {
        const double sum = sums[lane];
        const uint64_t right = left_over >= sum;
        uint64_t bits;
        std::memcpy(&bits, &sum, sizeof bits);
        bits &= ~right + 1;
        double taken;
        std::memcpy(&taken, &bits, sizeof taken);
        left_over -= taken;
        lane = 2 * lane + right;
      }
      const int64_t child = line[i] * kLine + static_cast<int64_t>(lane) - kLine;
      line[i] = child < last ? child : last;
      rest[i] = child > last ? kNowhere : left_over;
#if defined(__GNUC__)
      __builtin_prefetch(next + line[i] * kLine);
#endif
    }
  }
  int64_t slow = 0;
  for (int i = 0; i < kGroup; ++i) {
    const int64_t start = line[i] * kLine;
    const float* x = tree.raw[0] + start;
    const float wanted = static_cast<float>(rest[i]);
    // which four, and then which of them: sums of all before each
    const float fours[4] = {0.0f, (x[0] + x[1]) + (x[2] + x[3]), (x[4] + x[5]) + (x[6] + x[7]),
                            (x[8] + x[9]) + (x[10] + x[11])};
    const float before[4] = {0.0f, fours[1], fours[1] + fours[2], (fours[1] + fours[2]) + fours[3]};
    const int four = (wanted >= before[1]) + (wanted >= before[2]) + (wanted >= before[3]);
    const float* y = x + 4 * four;
    const float here = wanted - before[four];
    const float two = y[0] + y[1];
    const float sums[4] = {y[0], two, two + y[2], two + (y[2] + y[3])};
    const int k = 4 * four + (here >= sums[0]) + (here >= sums[1]) + (here >= sums[2]);
    index[i] = start + k;
    if (!(here < sums[k & 3])) {  // rounding has carried the mass beyond what there is
      index[i] = find_slowly(tree, mass[i]);
      ++slow;
    }
  }
  return slow;
}

#endif

int64_t find(const Tree& tree, const double* mass, int64_t count, int64_t* index) {
  int64_t done = 0, slow = 0;
  for (; done + kGroup <= count; done += kGroup) slow += find_group(tree, mass + done, index + done);
  if (done < count) {
    double some[kGroup] = {};
    int64_t found[kGroup];
    std::memcpy(some, mass + done, sizeof(double) * static_cast<std::size_t>(count - done));
    find_group(tree, some, found);
    std::memcpy(index + done, found, sizeof(int64_t) * static_cast<std::size_t>(count - done));
  }
  return slow;
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

void power(const float* error, int64_t count, float alpha, float epsilon, float* priority) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = std::fabs(error[i]) + epsilon;
    const float p = exp2_of(alpha * log2_of(x));
    // what is not finite must be seen by whoever looks at it next; zero stays zero
    priority[i] = x > 0.0f && x <= std::numeric_limits<float>::max() ? p : x;
  }
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
  const double total = tree.left[tree.top][0];
  if (!(total > 0.0)) return false;
  float least = std::numeric_limits<float>::infinity();
  if (tree.has_minimum)
    for (int i = 0; i < kLine; ++i) least = tree.least[tree.top][i] < least ? tree.least[tree.top][i] : least;
  const float scale = tree.has_minimum ? 1.0f / least : static_cast<float>(tree.capacity / total);
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
