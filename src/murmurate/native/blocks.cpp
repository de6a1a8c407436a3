// Built once for each instruction set, with different flags; MURMURATE_BLOCKS names the table that this build fills.
#include "blocks.hpp"

#include <cstring>

#if defined(__AVX512F__)
#include "transpose.hpp"
#endif

namespace murmurate {
namespace {

constexpr int64_t kSide = 4;  // side of a block; a row of a block is a word of 4 bytes

// One row of blocks: row kSide * c + i is row i of its pixels in channel c.
struct Rows {
  const uint8_t* pixels;
  int64_t plane, width, count;
  const uint8_t* at(int64_t row) const { return pixels + row / kSide * plane + row % kSide * width; }
};

// Transposes words: to [columns, rows] <- from [rows, columns].
#if defined(__AVX512F__)
inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>(count < 16 ? (1u << count) - 1 : 0xffffu); }

inline void transpose_words(const Rows& from, int64_t columns, uint8_t* to) {
  __m512i r[16];
  for (int64_t row = 0; row < from.count; row += 16)
    for (int64_t column = 0; column < columns; column += 16) {
      const __mmask16 column_mask = first_lanes(columns - column), row_mask = first_lanes(from.count - row);
      for (int64_t i = 0; i < 16; ++i)
        r[i] = row + i < from.count ? _mm512_maskz_loadu_epi32(column_mask, from.at(row + i) + column * kSide)
                                    : _mm512_setzero_si512();
      transpose(r);
      for (int64_t i = 0; i < 16 && column + i < columns; ++i)
        _mm512_mask_storeu_epi32(to + ((column + i) * from.count + row) * kSide, row_mask, r[i]);
    }
}
#else
inline void transpose_words(const Rows& from, int64_t columns, uint8_t* to) {
  for (int64_t row = 0; row < from.count; ++row)
    for (int64_t column = 0; column < columns; ++column)
      std::memcpy(to + (column * from.count + row) * kSide, from.at(row) + column * kSide, kSide);
}
#endif

inline void widen(const uint8_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(static_cast<int32_t>(from[i]));
}

// The lower half of the float of a number below 256 is 0, so its upper half is the exact bfloat16.
inline void widen(const uint8_t* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(static_cast<int32_t>(from[i]));
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to[i] = static_cast<uint16_t>(bits >> 16);
  }
}

template <typename T>
void to_blocks(const Frames& f, T* to) {
  alignas(64) uint8_t transposed[kMostChannels * kSide * kSide];
  const int64_t block = f.channels * kSide * kSide, columns_at_once = kMostChannels / f.channels;
  const int64_t plane = f.height * f.width;
  for (int64_t b = 0; b < f.batch; ++b)
    for (int64_t y = 0; y + kSide <= f.height; y += kSide)
      for (int64_t x = 0; x + kSide <= f.width; x += columns_at_once * kSide) {
        const Rows rows = {f.pixels + b * f.stride + y * f.width + x, plane, f.width, f.channels * kSide};
        const int64_t rest = (f.width - x) / kSide, columns = rest < columns_at_once ? rest : columns_at_once;
        transpose_words(rows, columns, transposed);
        widen(transposed, columns * block, to);
        to += columns * block;
      }
}

#if !defined(MURMURATE_BLOCKS)
#error "MURMURATE_BLOCKS names the table"
#endif

}  // namespace

extern const BlockKernels MURMURATE_BLOCKS;
const BlockKernels MURMURATE_BLOCKS = {MURMURATE_NAME, to_blocks<uint16_t>, to_blocks<float>};

}  // namespace murmurate
