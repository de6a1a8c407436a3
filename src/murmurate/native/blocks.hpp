// Rearranges frames into blocks of 4 x 4 pixels, once for each instruction set.
#pragma once

#include <cstdint>

namespace murmurate {

constexpr int64_t kMostChannels = 1024;

struct Frames {
  const uint8_t* pixels;  // [batch, channels, height, width]
  int64_t stride;         // from one frame of the batch to the next; each frame is contiguous
  int64_t batch, channels, height, width;  // channels: at most kMostChannels
};

// to [batch, height / 4, width / 4, channels, 4, 4], as bfloat16 or float32
struct BlockKernels {
  const char* name;
  void (*bfloat16)(const Frames&, uint16_t* to);
  void (*float32)(const Frames&, float* to);
};

extern const BlockKernels kBlocksPortable;
extern const BlockKernels kBlocksAvx2;
extern const BlockKernels kBlocksAvx512;

}  // namespace murmurate
