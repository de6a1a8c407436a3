// What the forward and backward pass of a torso share (see torso.hpp): geometry, memory, and products with windows.
#pragma once

#include "products.hpp"

namespace murmurate {

namespace MURMURATE_TILES {

// Memory for one pass, which the thread keeps for its next pass; nullptr if there is not enough.
char* scratch_of(int64_t bytes);

bool backward(const Torso&, int64_t batch, const Bf16* laid, const Bf16* inner, const Bf16* features,
              const Bf16* gradient, const Bf16* const* parameters, Bf16* const* gradients, int64_t first);

}  // namespace MURMURATE_TILES

namespace {

constexpr float kPixel = 1.0f / 255.0f;  // scale of frames, whose values are 0 to 255

inline int64_t out_height(const Layer& l) { return l.height - l.kernel + 1; }
inline int64_t out_width(const Layer& l) { return l.width - l.kernel + 1; }
inline int64_t grid(const Layer& l) { return l.height * l.width; }
inline int64_t depth(const Layer& l) { return l.kernel * l.kernel * l.channels; }
inline const Layer& last(const Torso& t) { return t.layer[t.layers - 1]; }
inline int64_t flat(const Torso& t) { return out_height(last(t)) * out_width(last(t)) * last(t).filters; }

// Numbers of one image that layer i passes on.
inline int64_t outputs(const Torso& t, int64_t i) {
  return i + 1 < t.layers ? grid(t.layer[i + 1]) * t.layer[i + 1].channels : flat(t);
}

// Divides a block of memory into arrays. With base nullptr, it only finds how much memory they need.
struct Arena {
  char* base;
  int64_t used;
  template <typename T>
  T* take(int64_t count) {
    T* array = reinterpret_cast<T*>(base + used);
    used += round_up(count * static_cast<int64_t>(sizeof(T)), kBytes);
    return array;
  }
};

// offset[j] <- offset of the 32 numbers of step j from a place's first number, for windows of `kernel` rows of `wide`
// numbers each, which are `row` numbers apart; returns the number of steps
inline int64_t step_offsets(int64_t kernel, int64_t wide, int64_t row, int64_t* offset) {
  int64_t step = 0;
  for (int64_t y = 0; y < kernel; ++y)
    for (int64_t k = 0; k < wide; k += kDeep) offset[step++] = y * row + k;
  return step;
}

// order[k] <- position, in a filter [row, column, channel], of the number that is multiplied with number k of a window.
// The blocks of the first layer are [channel, pixel], as frames are laid out; those of other layers [pixel, channel].
inline void filter_order(const Layer& l, bool first, int32_t* order) {
  const int64_t s = l.block, side = l.kernel * s, channels = l.channels / (s * s);
  for (int64_t y = 0; y < l.kernel; ++y)
    for (int64_t x = 0; x < l.kernel; ++x)
      for (int64_t k = 0; k < l.channels; ++k) {
        const int64_t pixel = first ? k % (s * s) : k / channels, channel = first ? k / (s * s) : k % channels;
        const int64_t row = y * s + pixel / s, column = x * s + pixel % s;
        *order++ = static_cast<int32_t>((row * side + column) * channels + channel);
      }
}

// Consecutive places, each the beginning of a window, and a right factor of `tiles` tiles of columns.
struct Line {
  const Bf16* x;
  int64_t places;
  Inner inner;
  const Bf16* right;
  int64_t tiles;
};

// Multiplies the windows with the right factor. finish(first, skip, tile, sums) gets the sums of 16 places from `first`
// on for one tile of columns, and skips the first `skip` of them: if the places are no multiple of 16, the last 16
// begin earlier, and some of them are finished already.
template <typename Finish>
void multiply_windows(const Line& line, const Finish& finish) {
  alignas(64) float sums[4 * kSums];
  const int64_t tile_numbers = line.inner.steps * kTile;  // of a tile of columns, in all steps
  const bool pairs = line.tiles > 1;
  const int64_t left_tiles = pairs ? 2 : 4;
  for (int64_t place = 0; place < line.places; place += left_tiles * kRows) {
    const Bf16* a[4];
    int64_t from[4], skip[4];
    for (int64_t i = 0; i < left_tiles; ++i) {
      const int64_t begin = place + i * kRows;
      from[i] = begin + kRows <= line.places ? begin : line.places - kRows;
      skip[i] = begin - from[i] < kRows ? begin - from[i] : kRows;
      a[i] = line.x + from[i] * line.inner.stride;
    }
    for (int64_t n = 0; n < line.tiles; n += 2) {
      const Bf16* b = line.right + n * tile_numbers;
      const int64_t right_tiles = pairs && n + 1 < line.tiles ? 2 : 1;
      if (pairs)
        products_2x2(line.inner, a[0], a[1], b, right_tiles == 2 ? b + tile_numbers : b, sums, sums + 2 * kSums);
      else
        products_4x1(line.inner, a, b, sums);
      for (int64_t i = 0; i < left_tiles; ++i)
        for (int64_t k = 0; k < right_tiles; ++k)
          if (skip[i] < kRows) finish(from[i], skip[i], n + k, sums + (pairs ? 2 * i + k : i) * kSums);
    }
  }
}

}  // namespace
}  // namespace murmurate
