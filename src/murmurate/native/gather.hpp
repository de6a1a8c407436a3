// Copies rows of a replay's storage. Memory latency is most of the cost, so rows are prefetched.
#pragma once

#include <cstdint>
#include <cstring>

namespace murmurate {

struct Field {
  int64_t offset, bytes;  // in a row
  char* out;              // [count, bytes]
};

constexpr int64_t kCacheLine = 64;
constexpr int64_t kAhead = 8;  // so many rows before its use a row is prefetched

inline void prefetch(const char* row, int64_t bytes) {
#if defined(__GNUC__)
  for (int64_t at = 0; at < bytes; at += kCacheLine) __builtin_prefetch(row + at);
#else
  (void)row, (void)bytes;
#endif
}

// out[i] <- bytes of base + index[i] * stride
inline void gather(const char* base, int64_t stride, int64_t bytes, const int64_t* index, int64_t count, char* out) {
  // only the beginning of long rows: the hardware prefetches the rest
  const int64_t prefetched = bytes < 4096 ? bytes : 2 * kCacheLine;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) prefetch(base + index[i + kAhead] * stride, prefetched);
    std::memcpy(out + i * bytes, base + index[i] * stride, static_cast<std::size_t>(bytes));
  }
}

// Fields are small: copies of a constant size, which compilers inline, cost less than a call. The last copy may
// overlap the one before.
inline void copy_field(char* to, const char* from, int64_t bytes) {
  if (bytes >= 16 && bytes <= 512) {
    for (int64_t at = 0; at + 16 <= bytes; at += 16) std::memcpy(to + at, from + at, 16);
    std::memcpy(to + bytes - 16, from + bytes - 16, 16);
  } else if (bytes == 4) {
    std::memcpy(to, from, 4);
  } else if (bytes == 8) {
    std::memcpy(to, from, 8);
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

// Copies each field of row index[i] to fields[k].out[i].
inline void split(const char* base, int64_t stride, const int64_t* index, int64_t count, const Field* fields,
                  int64_t field_count) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) prefetch(base + index[i + kAhead] * stride, stride);
    const char* row = base + index[i] * stride;
    for (int64_t k = 0; k < field_count; ++k)
      copy_field(fields[k].out + i * fields[k].bytes, row + fields[k].offset, fields[k].bytes);
  }
}

}  // namespace murmurate
