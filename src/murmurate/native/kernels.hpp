// The kernels of a sum tree whose nodes are cache lines, once for each instruction set.
//
// A tree over n leaves has levels 0 .. top. raw(0) has the leaves; raw(l) has the total of each line (16 numbers) of
// raw(l - 1); raw(top + 1) has one number, the total of all leaves. before(l), l >= 1, has for each number of raw(l)
// the sum of the numbers before it in its line. A search reads one line of `before` at each level: the child is the
// last one whose sum in `before` is not above the mass (sums after the last positive number are infinite). Sums are
// computed in an order that keeps them non-decreasing along a line.
#pragma once

#include <cstddef>
#include <cstdint>

namespace murmurate {

constexpr int kLine = 16;
constexpr int64_t kMostLeaves = int64_t{1} << 32;  // 16^8
constexpr int kLevels = 9;                         // of raw in a tree of kMostLeaves: from 0 to top + 1

struct Tree {
  int64_t capacity;       // leaves in use
  int32_t top;            // number of levels above the leaves
  int64_t lines[kLevels]; // lines of raw(l)
  float* raw[kLevels];    // from level 0 to top + 1
  float* before[kLevels]; // from level 1 to top
  float* least[kLevels];  // least positive leaf below each number of raw, from level 1 to top + 1

  float total() const { return raw[top + 1][0]; }
  float minimum() const { return least[top + 1][0]; }
};

// threads: number of threads that search for a large batch, the caller's among them; results do not depend on it.
struct Kernels {
  const char* name;
  // For each mass in [0, total) the leaf whose interval holds it.
  void (*find)(const Tree&, const double* mass, int64_t count, int64_t* index, int64_t threads);
  // Sets leaves (of equal indices, the last priority counts), and recomputes all sums above them.
  void (*set)(const Tree&, const int64_t* index, const float* priority, int64_t count);
  // priority <- (|error| + epsilon) ** alpha; returns the greatest priority, which is not finite if any is not
  float (*power)(const float* error, int64_t count, float alpha, float epsilon, float* priority);
  // Draws leaves with probability p / total; weight <- (p / least positive p) ** -beta. state: a key, and
  // a counter of draws. False if no leaf is positive or the total is not finite.
  bool (*sample)(const Tree&, uint64_t* state, int64_t count, float beta, int64_t* index, float* weight,
                 bool stratified, int64_t threads);
};

extern const Kernels kPortable;
extern const Kernels kAvx2;
extern const Kernels kAvx512;

}  // namespace murmurate
