// Products of tiles, once in AMX and once in AVX-512 (tiles.hpp says what a tile holds):
//
// - products_2x2: two left factors times two right factors: sums_a0 [2, 16, 16] <- a0 b0, a0 b1;
//   sums_a1 [2, 16, 16] <- a1 b0, a1 b1; if `add`, they are added to the previous contents. If there is only one right
//   factor, b1 is b0, and the second result of each is meaningless.
// - products_4x1: sums [4, 16, 16] <- four left factors times one right factor.
// - products_1x4: sums [4, 16, 16] += one left factor times four right factors, which are two pairs of neighbouring
//   tiles, the second pair `apart` numbers behind the first.
//
// A TileConfig must exist while any of them is called.
#pragma once

#include "tiles.hpp"

namespace murmurate {
namespace {

// The inner dimension of a product, in steps of 32 numbers. Rows of the left factor are `stride` numbers apart, and
// step j begins offset[j] numbers after a row's beginning. Steps of the right factor are `right` numbers apart.
struct Inner {
  int64_t stride;
  const int64_t* offset;
  int64_t steps, right;
};

#if defined(__AMX_BF16__)

// While it exists, all tile registers are configured with their full size.
class TileConfig {
 public:
  TileConfig() {
    alignas(64) struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; ++i) shape.bytes[i] = kBytes, shape.rows[i] = kRows;
    compiler_barrier();
    _tile_loadconfig(&shape);
  }
  ~TileConfig() { _tile_release(); }
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;
};

inline void products_2x2(const Inner& in, const Bf16* a0, const Bf16* a1, const Bf16* b0, const Bf16* b1,
                         float* sums_a0, float* sums_a1, bool add = false) {
  const int64_t stride = in.stride * static_cast<int64_t>(sizeof(Bf16));
  if (add) {
    _tile_loadd(0, sums_a0, kBytes);
    _tile_loadd(1, sums_a0 + kSums, kBytes);
    _tile_loadd(2, sums_a1, kBytes);
    _tile_loadd(3, sums_a1 + kSums, kBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t j = 0; j < in.steps; ++j) {
    const int64_t left = in.offset[j], right = j * in.right;
    _tile_loadd(4, a0 + left, stride);
    _tile_loadd(6, b0 + right, kBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1 + right, kBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a1 + left, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums_a0, kBytes);
  _tile_stored(1, sums_a0 + kSums, kBytes);
  _tile_stored(2, sums_a1, kBytes);
  _tile_stored(3, sums_a1 + kSums, kBytes);
}

inline void products_4x1(const Inner& in, const Bf16* const* a, const Bf16* b, float* sums) {
  const int64_t stride = in.stride * static_cast<int64_t>(sizeof(Bf16));
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t j = 0; j < in.steps; ++j) {
    const int64_t left = in.offset[j];
    _tile_loadd(7, b + j * in.right, kBytes);
    _tile_loadd(4, a[0] + left, stride);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, a[1] + left, stride);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(6, a[2] + left, stride);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(4, a[3] + left, stride);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, sums, kBytes);
  _tile_stored(1, sums + kSums, kBytes);
  _tile_stored(2, sums + 2 * kSums, kBytes);
  _tile_stored(3, sums + 3 * kSums, kBytes);
}

inline void products_1x4(const Inner& in, const Bf16* a, const Bf16* b, int64_t apart, float* sums) {
  const int64_t stride = in.stride * static_cast<int64_t>(sizeof(Bf16));
  _tile_loadd(0, sums, kBytes);
  _tile_loadd(1, sums + kSums, kBytes);
  _tile_loadd(2, sums + 2 * kSums, kBytes);
  _tile_loadd(3, sums + 3 * kSums, kBytes);
  for (int64_t j = 0; j < in.steps; ++j) {
    const Bf16* right = b + j * in.right;
    _tile_loadd(4, a + in.offset[j], stride);
    _tile_loadd(5, right, kBytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, right + kTile, kBytes);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, right + apart, kBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, right + apart + kTile, kBytes);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, sums, kBytes);
  _tile_stored(1, sums + kSums, kBytes);
  _tile_stored(2, sums + 2 * kSums, kBytes);
  _tile_stored(3, sums + 3 * kSums, kBytes);
}

#else

class TileConfig {
 public:
  TileConfig() {}  // AVX-512 needs nothing prepared
  TileConfig(const TileConfig&) = delete;
  TileConfig& operator=(const TileConfig&) = delete;
};

// A register has the 16 sums of one row. An instruction multiplies one pair of numbers of the left factor, the same in
// all lanes, with a row of pairs of the right factor. `Rows` times `Columns` registers of sums are few enough to exist,
// and enough to hide the latency of the instruction.
template <int Rows, int Columns>
inline void product(const Inner& in, const Bf16* a, const Bf16* const (&b)[Columns], float* const (&sums)[Columns],
                    bool add) {
  __m512 s[Rows][Columns];
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Columns; ++c) s[r][c] = add ? _mm512_loadu_ps(sums[c] + r * kRows) : _mm512_setzero_ps();
  for (int64_t j = 0; j < in.steps; ++j) {
    const Bf16* left = a + in.offset[j];
    for (int64_t k = 0; k < kRows; ++k) {
      __m512bh right[Columns];
      for (int c = 0; c < Columns; ++c)
        right[c] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b[c] + j * in.right + k * kDeep));
      for (int r = 0; r < Rows; ++r) {
        int32_t pair;
        std::memcpy(&pair, left + r * in.stride + 2 * k, sizeof pair);
        for (int c = 0; c < Columns; ++c)
          s[r][c] = _mm512_dpbf16_ps(s[r][c], right[c], reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)));
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Columns; ++c) _mm512_storeu_ps(sums[c] + r * kRows, s[r][c]);
}

inline void products_2x2(const Inner& in, const Bf16* a0, const Bf16* a1, const Bf16* b0, const Bf16* b1,
                         float* sums_a0, float* sums_a1, bool add = false) {
  constexpr int kHalf = kRows / 2;
  const Bf16* left[2] = {a0, a1};
  float* sums[2] = {sums_a0, sums_a1};
  for (int i = 0; i < 2; ++i) {
    if (b0 == b1) {
      product<kRows, 1>(in, left[i], {b0}, {sums[i]}, add);
      continue;
    }
    for (int row = 0; row < kRows; row += kHalf) {
      float* to = sums[i] + row * kRows;
      product<kHalf, 2>(in, left[i] + row * in.stride, {b0, b1}, {to, to + kSums}, add);
    }
  }
}

inline void products_4x1(const Inner& in, const Bf16* const* a, const Bf16* b, float* sums) {
  for (int i = 0; i < 4; ++i) product<kRows, 1>(in, a[i], {b}, {sums + i * kSums}, false);
}

inline void products_1x4(const Inner& in, const Bf16* a, const Bf16* b, int64_t apart, float* sums) {
  constexpr int kRowsAtOnce = 4;
  for (int row = 0; row < kRows; row += kRowsAtOnce) {
    float* to = sums + row * kRows;
    product<kRowsAtOnce, 4>(in, a + row * in.stride, {b, b + kTile, b + apart, b + apart + kTile},
                      {to, to + kSums, to + 2 * kSums, to + 3 * kSums}, true);
  }
}

#endif

}  // namespace
}  // namespace murmurate
