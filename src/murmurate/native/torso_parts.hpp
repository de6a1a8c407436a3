// What both passes through a torso need (see torso.hpp): its geometry, memory, and products along a line of places.
#pragma once

#include "products.hpp"

namespace murmurate {

namespace MURMURATE_TILES {

// Memory for one pass, which the thread keeps for its next one; nullptr if there is none.
char* room_of(int64_t bytes);

bool backward(const Torso&, int64_t batch, const Brain* laid, const Brain* inner, const Brain* features,
              const Brain* gradient, const Brain* const* parameters, Brain* const* gradients, int64_t first);

}  // namespace MURMURATE_TILES

namespace {

constexpr float kPixel = 1.0f / 255.0f;  // frames come from 0 to 255

inline int64_t out_height(const Layer& l) { return l.height - l.kernel + 1; }
inline int64_t out_width(const Layer& l) { return l.width - l.kernel + 1; }
inline int64_t grid(const Layer& l) { return l.height * l.width; }
inline int64_t depth(const Layer& l) { return l.kernel * l.kernel * l.channels; }
inline const Layer& last(const Torso& t) { return t.layer[t.layers - 1]; }
inline int64_t flat(const Torso& t) { return out_height(last(t)) * out_width(last(t)) * last(t).filters; }

// Numbers of an image behind layer i.
inline int64_t outputs(const Torso& t, int64_t i) {
  return i + 1 < t.layers ? grid(t.layer[i + 1]) * t.layer[i + 1].channels : flat(t);
}

// Hands memory out. The first time, without memory, it finds how much is needed.
struct Shares {
  char* base;
  int64_t used;
  template <typename T>
  T* take(int64_t count) {
    T* here = reinterpret_cast<T*>(base + used);
    used += up(count * static_cast<int64_t>(sizeof(T)), kBytes);
    return here;
  }
};

// offset[j]: where the 32 numbers of step j lie behind a place's first one, for windows of `kernel` rows of `wide`
// numbers each, rows `row` numbers apart
inline int64_t steps_of(int64_t kernel, int64_t wide, int64_t row, int64_t* offset) {
  int64_t step = 0;
  for (int64_t y = 0; y < kernel; ++y)
    for (int64_t k = 0; k < wide; k += kDeep) offset[step++] = y * row + k;
  return step;
}

// order[k]: where the number that meets number k of a window lies in a filter [row, column, channel]. Pixels of a
// first layer's blocks are the last axis, as frames have them; channels are that of other layers.
inline void order_of(const Layer& l, bool first, int32_t* order) {
  const int64_t s = l.block, side = l.kernel * s, channels = l.channels / (s * s);
  for (int64_t y = 0; y < l.kernel; ++y)
    for (int64_t x = 0; x < l.kernel; ++x)
      for (int64_t k = 0; k < l.channels; ++k) {
        const int64_t pixel = first ? k % (s * s) : k / channels, channel = first ? k / (s * s) : k % channels;
        const int64_t row = y * s + pixel / s, column = x * s + pixel % s;
        *order++ = static_cast<int32_t>((row * side + column) * channels + channel);
      }
}

// All places of a line with a window each, times a right factor of `tiles` tiles of columns.
struct Line {
  const Brain* x;
  int64_t places;
  Inner inner;
  const Brain* right;
  int64_t tiles;
};

// finish(first, skip, tile, sums): rows from `skip` on of 16 places, of one tile of columns. A line need not be
// a multiple of 16 long: its last tile begins earlier, and skips what was finished before.
template <typename Finish>
void go_along(const Line& line, const Finish& finish) {
  alignas(64) float sums[4 * kSums];
  const int64_t wide = line.inner.steps * kTile;  // numbers of a tile of columns
  const bool pairs = line.tiles > 1;
  const int64_t tall = pairs ? 2 : 4;
  for (int64_t place = 0; place < line.places; place += tall * kRows) {
    const Brain* a[4];
    int64_t from[4], skip[4];
    for (int64_t i = 0; i < tall; ++i) {
      const int64_t wanted = place + i * kRows;
      from[i] = wanted + kRows <= line.places ? wanted : line.places - kRows;
      skip[i] = wanted - from[i] < kRows ? wanted - from[i] : kRows;
      a[i] = line.x + from[i] * line.inner.stride;
    }
    for (int64_t n = 0; n < line.tiles; n += 2) {
      const Brain* b = line.right + n * wide;
      const int64_t some = pairs && n + 1 < line.tiles ? 2 : 1;
      if (pairs)
        products_2x2(line.inner, a[0], a[1], b, some == 2 ? b + wide : b, sums, sums + 2 * kSums);
      else
        products_4x1(line.inner, a, b, sums);
      for (int64_t i = 0; i < tall; ++i)
        for (int64_t k = 0; k < some; ++k)
          if (skip[i] < kRows) finish(from[i], skip[i], n + k, sums + (pairs ? 2 * i + k : i) * kSums);
    }
  }
}

}  // namespace
}  // namespace murmurate
