// Runs the parts of one piece of work on a few threads, which are kept for the next call.
#pragma once

#include <cstdint>

namespace murmurate {

using Part = void (*)(const void* work, int64_t part);

// Calls `part` once for each number 0 .. parts - 1, on up to `threads` threads (64 at most), the caller's among them,
// and returns when all calls are done. Each thread takes the next part when it is free, so a thread that wakes up late
// delays nothing. `part` must not throw. While the threads serve another call, or if there are none, the caller does
// all parts.
void in_parts(int64_t threads, int64_t parts, Part part, const void* work);

template <typename Work>
void in_parts(int64_t threads, int64_t parts, const Work& work) {
  in_parts(
      threads, parts, [](const void* erased, int64_t part) { (*static_cast<const Work*>(erased))(part); }, &work);
}

}  // namespace murmurate
