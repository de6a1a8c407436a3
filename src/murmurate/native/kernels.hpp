// The kernels of a sum tree whose nodes are cache lines, once for each instruction set.
//
// A tree over n leaves has levels 0 .. top. raw(0) are the leaves; raw(l) has the total of each line (16 numbers)
// of raw(l - 1). left(l), l >= 1, holds for each line of raw(l) the left sums of a binary tree over its 16
// numbers, in heap order: lane 0 the total, lane 1 the left half, lanes 2-3 the left quarters of both halves,
// lanes 4-7 left eighths, lanes 8-15 every second number. A search reads one line of left a level.
#pragma once

#include <cstddef>
#include <cstdint>

namespace murmurate {

constexpr int kLine = 16;
constexpr int kLevels = 9;  // 16^8 leaves are more than an index can count

struct Tree {
  int64_t capacity;       // leaves in use
  int32_t top;            // number of levels above the leaves
  int32_t has_minimum;
  int64_t lines[kLevels]; // lines of raw(l)
  float* raw[kLevels];
  float* left[kLevels];   // from level 1 on
  float* least[kLevels];  // least positive number of each line of the level below; from level 1 on
};

struct Kernels {
  const char* name;
  // For each mass in [0, total) the leaf whose interval holds it. Returns how many had to be searched slowly.
  int64_t (*find)(const Tree&, const double* mass, int64_t count, int64_t* index);
  // Leaves <- priority (the last of equal indices wins), and all above them anew.
  void (*set)(const Tree&, const int64_t* index, const float* priority, int64_t count);
  // priority <- (|error| + epsilon) ** alpha
  void (*power)(const float* error, int64_t count, float alpha, float epsilon, float* priority);
  // Draws with chance p / total; weight <- (p / least positive p) ** -beta. state: a key, and a counter of
  // draws. False if there is nothing to draw.
  bool (*sample)(const Tree&, uint64_t* state, int64_t count, float beta, int64_t* index, float* weight,
                 bool stratified);
};

extern const Kernels kPortable;
extern const Kernels kAvx2;
extern const Kernels kAvx512;

}  // namespace murmurate
