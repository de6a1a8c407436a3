// Tiles, as AMX's matrix registers hold them: 16 rows of 64 bytes. These are 16 x 32 bfloat16 numbers of a left factor,
// 16 x 16 pairs of bfloat16 numbers of a right factor (row i has rows 2 i and 2 i + 1 of the matrix, interleaved), or
// 16 x 16 float32 sums. products.hpp multiplies them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "torso.hpp"
#include "transpose.hpp"

namespace murmurate {
namespace {

constexpr int64_t kRows = 16;    // rows of a tile; also its columns of pairs or sums
constexpr int64_t kDeep = 32;    // numbers of a left factor's row
constexpr int64_t kTile = 512;   // bfloat16 numbers of a tile
constexpr int64_t kSums = 256;   // float32 numbers of a tile
constexpr int64_t kBytes = 64;   // bytes of a tile's row

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The compiler does not know that tiles are loaded from memory: this makes it finish all earlier stores.
inline void compiler_barrier() { __asm__ volatile("" ::: "memory"); }

// Packs `rows` <= 16 rows of `steps` x 32 numbers as the columns of a right factor, one tile after another.
inline void pack_columns(const Bf16* from, int64_t stride, int64_t rows, int64_t steps, Bf16* to) {
  __m512i r[16];
  for (int64_t j = 0; j < steps; ++j, to += kTile) {
    for (int64_t i = 0; i < kRows; ++i)
      r[i] = i < rows ? _mm512_loadu_si512(from + i * stride + j * kDeep) : _mm512_setzero_si512();
    transpose(r);
    for (int64_t i = 0; i < kRows; ++i) _mm512_storeu_si512(to + i * kDeep, r[i]);
  }
}

// Packs rows of `columns` numbers (a multiple of 16) as the rows of a right factor: for each 32 columns, `steps` times
// two tiles. Rows from `rows` on count as 0.
inline void pack_pairs(const Bf16* from, int64_t stride, int64_t rows, int64_t columns, int64_t steps, Bf16* to) {
  alignas(64) Bf16 low[32], high[32];
  for (Bf16 i = 0; i < 16; ++i) {
    low[2 * i] = i, low[2 * i + 1] = static_cast<Bf16>(32 + i);
    high[2 * i] = static_cast<Bf16>(16 + i), high[2 * i + 1] = static_cast<Bf16>(48 + i);
  }
  const __m512i first = _mm512_load_si512(low), second = _mm512_load_si512(high);
  const auto mix = [&](__m512i a, __m512i b, Bf16* packed) {
    _mm512_store_si512(packed, _mm512_permutex2var_epi16(a, first, b));
    _mm512_store_si512(packed + kTile, _mm512_permutex2var_epi16(a, second, b));
  };
  const int64_t full_columns = columns / kDeep * kDeep, band = steps * 2 * kTile;  // band: numbers of 32 columns
  for (int64_t pair = 0; pair < steps * kRows; ++pair) {
    const Bf16 *upper = from + 2 * pair * stride, *lower = upper + stride;
    Bf16* packed = to + pair / kRows * 2 * kTile + pair % kRows * kDeep;
    int64_t column = 0;
    if (2 * pair + 1 < rows)
      for (; column < full_columns; column += kDeep, packed += band)
        mix(_mm512_loadu_si512(upper + column), _mm512_loadu_si512(lower + column), packed);
    const __mmask32 upper_mask = 2 * pair < rows ? ~__mmask32{0} : 0;
    const __mmask32 lower_mask = 2 * pair + 1 < rows ? ~__mmask32{0} : 0;
    for (; column < columns; column += kDeep, packed += band) {
      const __mmask32 column_mask = column < full_columns ? ~__mmask32{0} : 0xffffu;
      mix(_mm512_maskz_loadu_epi16(upper_mask & column_mask, upper + column),
          _mm512_maskz_loadu_epi16(lower_mask & column_mask, lower + column), packed);
    }
  }
}

// Transposes: to [columns, stride] <- from [rows, columns]; rows are a multiple of 32, columns of 16.
inline void transpose_numbers(const Bf16* from, int64_t rows, int64_t columns, Bf16* to, int64_t stride) {
  __m512i r[16];
  for (int64_t row = 0; row < rows; row += kDeep)
    for (int64_t column = 0; column < columns; column += kRows) {
      for (int64_t i = 0; i < kRows; ++i) {
        const Bf16* at = from + (row + 2 * i) * columns + column;
        const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
        const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + columns)));
        r[i] = _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
      }
      transpose(r);
      for (int64_t i = 0; i < kRows; ++i) _mm512_storeu_si512(to + (column + i) * stride + row, r[i]);
    }
}

// -- numbers ------------------------------------------------------------------------------------------------

inline __m256i rounded(__m512 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

inline __m512i rounded(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

inline __m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline __m256i load16(const Bf16* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

inline void store16(Bf16* at, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), x); }

// Zero as the first operand: a NaN passes, as it does in torch.
inline __m512 rectified(__m512 x) { return _mm512_max_ps(_mm512_setzero_ps(), x); }

// Which outputs of a ReLU let a gradient pass: all but zeros of either sign.
inline __mmask16 passes_relu(__m256i output) { return _mm256_test_epi16_mask(output, _mm256_set1_epi16(0x7fff)); }

}  // namespace
}  // namespace murmurate
