// One piece of work in parts, on a few threads that wait for the next one.
#pragma once

#include <cstdint>

namespace murmurate {

using Part = void (*)(const void* work, int64_t part);

// Calls `part` once for each of 0 .. parts - 1, on up to `threads` threads, the caller's among them, and returns
// when all are done. Nobody waits for a thread that wakes up late: who is there takes the next part. What is
// called does not throw. Where others are served already, or threads cannot be had, the caller does all of it.
void in_parts(int64_t threads, int64_t parts, Part part, const void* work);

template <typename Work>
void in_parts(int64_t threads, int64_t parts, const Work& work) {
  in_parts(
      threads, parts, [](const void* same, int64_t part) { (*static_cast<const Work*>(same))(part); }, &work);
}

}  // namespace murmurate
