// A torso of convolutions and one fully connected layer, each with a ReLU: both passes in bfloat16, with sums in
// float32, in the matrix registers of AMX or with AVX-512's products of pairs.
//
// Every layer is read in blocks: a convolution with kernel s T and stride s over c channels is one with kernel T
// and stride 1 over the s s c channels of blocks of s x s. So a layer's input [batch, height, width, channels] is a
// sequence of places, and a filter at a place reads numbers at fixed offsets from it. All places of a batch are
// processed as one sequence; results at the last T - 1 places of a row or column are meaningless and are left out.
#pragma once

#include <cstdint>

namespace murmurate {

using Brain = uint16_t;  // the bits of a bfloat16

struct Layer {
  int64_t height, width;  // of the input, in blocks
  int64_t channels;       // of a block
  int64_t kernel;         // T: blocks of a filter, in height and in width
  int64_t filters;
  int64_t block;  // s
};

struct Torso {
  static constexpr int64_t kMost = 8;  // layers
  int64_t layers;
  Layer layer[kMost];
  int64_t features;  // of the fully connected layer
};

// backward: the gradients of all parameters from that of the features; layers before `first` are skipped, and the
// addresses of their gradients not read. Both passes return false if there is no memory.
struct TorsoKernels {
  const char* name;
  // Whether whole tiles cover the layers, and each layer reads what the one before it gives.
  bool (*fits)(const Torso&);
  // Numbers that forward leaves for backward: the outputs of the convolutions, for the layer behind.
  int64_t (*inner)(const Torso&, int64_t batch);
  // laid: the frames in blocks, from 0 to 255. parameters: weight and bias of each layer, filters as [filter, row,
  // column, channel].
  bool (*forward)(const Torso&, int64_t batch, const Brain* laid, const Brain* const* parameters, Brain* inner,
                  Brain* features);
  bool (*backward)(const Torso&, int64_t batch, const Brain* laid, const Brain* inner, const Brain* features,
                   const Brain* gradient, const Brain* const* parameters, Brain* const* gradients, int64_t first);
};

extern const TorsoKernels kTorsoAmx;         // matrix registers
extern const TorsoKernels kTorsoAvx512Bf16;  // AVX512_BF16

}  // namespace murmurate
