// One piece of work in parts, on a few threads that wait for the next one.
#pragma once

#include <cstdint>

namespace murmurate {

using Part = void (*)(const void* work, int64_t part);

// Calls `part` once for each of 0 .. parts - 1, on up to `threads` threads, the caller's among them, and returns
// when all are done. Each thread takes the next part when it is free, so one that wakes up late delays nothing.
// `part` must not throw. While the threads serve another call, or if there are none, the caller does all parts.
void in_parts(int64_t threads, int64_t parts, Part part, const void* work);

template <typename Work>
void in_parts(int64_t threads, int64_t parts, const Work& work) {
  in_parts(
      threads, parts, [](const void* same, int64_t part) { (*static_cast<const Work*>(same))(part); }, &work);
}

}  // namespace murmurate
