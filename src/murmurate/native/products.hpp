// Products of tiles, once in AMX and once in AVX-512 (see tiles.hpp for what lies in a tile):
//
// - products_2x2: two left factors' rows times two right factors' columns: one [2, 16, 16] <- those of a0, two <-
//   those of a1; added to what is there if `add` says so. Without a second right factor, b1 is b0, and what is
//   behind its columns means nothing.
// - products_4x1: sums [4, 16, 16] <- four left factors' rows times one right factor's columns.
// - products_1x4: sums [4, 16, 16] <- themselves and one left factor's rows times four right factors' columns, the
//   second pair of them `apart` from the first.
//
// While any of them is called a Tiles lives.
#pragma once

#include "tiles.hpp"

namespace murmurate {
namespace {

// A product's left factor: rows `stride` numbers apart; step j of the inner dimension begins offset[j] behind a row's
// beginning. The right factor has its steps `right` numbers apart.
struct Inner {
  int64_t stride;
  const int64_t* offset;
  int64_t steps, right;
};

#if defined(__AMX_BF16__)

// All registers whole, as long as this lives.
class Tiles {
 public:
  Tiles() {
    alignas(64) struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int i = 0; i < 8; ++i) shape.bytes[i] = kBytes, shape.rows[i] = kRows;
    settle();
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

inline void products_2x2(const Inner& in, const Brain* a0, const Brain* a1, const Brain* b0, const Brain* b1,
                         float* one, float* two, bool add = false) {
  const int64_t stride = in.stride * static_cast<int64_t>(sizeof(Brain));
  if (add) {
    _tile_loadd(0, one, kBytes);
    _tile_loadd(1, one + kSums, kBytes);
    _tile_loadd(2, two, kBytes);
    _tile_loadd(3, two + kSums, kBytes);
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
  _tile_stored(0, one, kBytes);
  _tile_stored(1, one + kSums, kBytes);
  _tile_stored(2, two, kBytes);
  _tile_stored(3, two + kSums, kBytes);
}

inline void products_4x1(const Inner& in, const Brain* const* a, const Brain* b, float* sums) {
  const int64_t stride = in.stride * static_cast<int64_t>(sizeof(Brain));
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

inline void products_1x4(const Inner& in, const Brain* a, const Brain* b, int64_t apart, float* sums) {
  const int64_t stride = in.stride * static_cast<int64_t>(sizeof(Brain));
  _tile_loadd(0, sums, kBytes);
  _tile_loadd(1, sums + kSums, kBytes);
  _tile_loadd(2, sums + 2 * kSums, kBytes);
  _tile_loadd(3, sums + 3 * kSums, kBytes);
  for (int64_t j = 0; j < in.steps; ++j) {
    const Brain* right = b + j * in.right;
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

class Tiles {
 public:
  Tiles() {}  // AVX-512 needs nothing prepared
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// A register has 16 sums, of one row. What it takes of the left factor is one pair of numbers, the same for all its
// lanes, and of the right one a row of pairs. `Rows` times `Columns` sums, few enough to stay in registers, hide how
// long a product takes.
template <int Rows, int Columns>
inline void product(const Inner& in, const Brain* a, const Brain* const (&b)[Columns], float* const (&sums)[Columns],
                    bool add) {
  __m512 s[Rows][Columns];
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Columns; ++c) s[r][c] = add ? _mm512_loadu_ps(sums[c] + r * kRows) : _mm512_setzero_ps();
  for (int64_t j = 0; j < in.steps; ++j) {
    const Brain* left = a + in.offset[j];
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

inline void products_2x2(const Inner& in, const Brain* a0, const Brain* a1, const Brain* b0, const Brain* b1,
                         float* one, float* two, bool add = false) {
  constexpr int kHalf = kRows / 2;
  const Brain* left[2] = {a0, a1};
  float* sums[2] = {one, two};
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

inline void products_4x1(const Inner& in, const Brain* const* a, const Brain* b, float* sums) {
  for (int i = 0; i < 4; ++i) product<kRows, 1>(in, a[i], {b}, {sums + i * kSums}, false);
}

inline void products_1x4(const Inner& in, const Brain* a, const Brain* b, int64_t apart, float* sums) {
  constexpr int kSome = 4;
  for (int row = 0; row < kRows; row += kSome) {
    float* to = sums + row * kRows;
    product<kSome, 4>(in, a + row * in.stride, {b, b + kTile, b + apart, b + apart + kTile},
                      {to, to + kSums, to + 2 * kSums, to + 3 * kSums}, true);
  }
}

#endif

}  // namespace
}  // namespace murmurate
