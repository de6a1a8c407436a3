// Sums and least numbers of lines, for the instruction set that the including file is built for.
#pragma once

#include "kernels.hpp"

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || defined(__SSE2__)
#include <immintrin.h>
#endif

namespace murmurate {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Prefix sums of 16 numbers (Sklansky 1960): in groups of 2, 4, 8, 16 the upper half adds the last sum of the lower
// half. Sums of non-negative numbers are non-decreasing in spite of rounding, because the same last sum is added to
// non-decreasing sums. All instruction sets add in this order, so that their trees are equal to the bit.
inline void prefix_sums(const float* line, float* sum) {
  std::memcpy(sum, line, kLine * sizeof(float));
  for (int half = 1; half < kLine; half *= 2)
    for (int i = 0; i < kLine; ++i)
      if (i & half) sum[i] += sum[(i & ~(2 * half - 1)) + half - 1];
}

#ifdef __AVX512F__

using Line = __m512;

inline Line load(const float* line) { return _mm512_load_ps(line); }

inline Line prefix_sums(Line x) {
  x = _mm512_mask_add_ps(x, 0xAAAA, x, _mm512_moveldup_ps(x));
  x = _mm512_mask_add_ps(x, 0xCCCC, x, _mm512_permute_ps(x, 0x55));
  x = _mm512_mask_add_ps(x, 0xF0F0, x, _mm512_permute_ps(_mm512_shuffle_f32x4(x, x, 0xA0), 0xFF));
  return _mm512_mask_add_ps(x, 0xFF00, x, _mm512_permutexvar_ps(_mm512_set1_epi32(7), x));
}

// Half a line. Shuffles of 256 bits run on two ports of the processor, shuffles of 512 bits on one.
using Half = __m256;

inline Half prefix_sums(Half x) {
  x = _mm256_mask_add_ps(x, 0xAA, x, _mm256_moveldup_ps(x));
  x = _mm256_mask_add_ps(x, 0xCC, x, _mm256_permute_ps(x, 0x55));
  return _mm256_mask_add_ps(x, 0xF0, x, _mm256_permutexvar_ps(_mm256_set1_epi32(3), x));
}

inline Half last(Half x) { return _mm256_permutexvar_ps(_mm256_set1_epi32(7), x); }

// Writes the sum before each number of a line, and returns the total. After the last positive number the sums are
// infinite, so a mass that rounding has carried beyond the total is found at that number.
inline float sums_before(const float* line, float* before) {
  const Half low = prefix_sums(_mm256_load_ps(line)), high = prefix_sums(_mm256_load_ps(line + 8));
  const Half upper = _mm256_add_ps(high, last(low)), all = last(upper), infinity = _mm256_set1_ps(kInfinity);
  // the sum reaches the total at the last positive number; all later numbers have the total before them
  const Half first = _mm256_mask_mov_ps(infinity, _mm256_cmp_ps_mask(low, all, _CMP_LT_OQ), low);
  const Half second = _mm256_mask_mov_ps(infinity, _mm256_cmp_ps_mask(upper, all, _CMP_LT_OQ), upper);
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

// The least of 16 non-negative numbers, whose bits as integers have the same order; `plus` is added to its bits.
inline float least_of(__m256i low, __m256i high, uint32_t plus) {
  const __m256i pairs = _mm256_min_epu32(low, high);
  __m128i x = _mm_min_epu32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  x = _mm_min_epu32(x, _mm_shuffle_epi32(x, 0x4E));
  x = _mm_min_epu32(x, _mm_shuffle_epi32(x, 0xB1));
  const uint32_t bits = static_cast<uint32_t>(_mm_cvtsi128_si32(x)) + plus;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline float least(const float* line) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(line);
  return least_of(_mm256_load_si256(halves), _mm256_load_si256(halves + 1), 0);
}

// One is subtracted from the bits, so that zero becomes the greatest unsigned integer. Without a positive number
// least_of gives zero, and infinity is returned.
inline float least_positive(const float* line) {
  const __m256i* halves = reinterpret_cast<const __m256i*>(line);
  const __m256i one = _mm256_set1_epi32(1);
  const float result = least_of(_mm256_sub_epi32(_mm256_load_si256(halves), one),
                                _mm256_sub_epi32(_mm256_load_si256(halves + 1), one), 1);
  return result > 0.0f ? result : kInfinity;
}

#else

// Writes the sum before each number of a line, and returns the total. After the last positive number the sums are
// infinite, so a mass that rounding has carried beyond the total is found at that number.
inline float sums_before(const float* line, float* before) {
  alignas(64) float sum[kLine];
  prefix_sums(line, sum);
  before[0] = 0.0f;
  // the sum reaches the total at the last positive number; all later numbers have the total before them
  for (int i = 1; i < kLine; ++i) before[i] = sum[i - 1] < sum[kLine - 1] ? sum[i - 1] : kInfinity;
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

}  // namespace
}  // namespace murmurate
