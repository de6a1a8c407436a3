// A torso (the shared lower layers of a network): convolutions and one fully connected layer, each with a ReLU. Forward
// and backward pass are in bfloat16, with sums in float32, in AMX's matrix registers or by AVX-512's products of pairs.
//
// Every layer reads its input in blocks: a convolution with kernel s T and stride s over c channels is equal to one
// with kernel T and stride 1 over the s s c channels of blocks of s x s. So a layer's input [batch, height, width,
// channels] is a sequence of places (positions of blocks), and a filter at a place reads numbers at fixed offsets from
// it. All places of a batch are processed as one sequence; results at the last T - 1 places of a row or column are
// meaningless and are left out.
#pragma once

#include <cstdint>

namespace murmurate {

using Bf16 = uint16_t;  // the bits of a bfloat16

struct Layer {
  int64_t height, width;  // of the input, in blocks
  int64_t channels;       // of a block: s s c
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

// backward: computes the gradients of all parameters from the gradient of the features; layers before `first` are
// skipped, and the addresses of their gradients are not read. Both passes return false if there is not enough memory.
struct TorsoKernels {
  const char* name;
  // Whether the layers' sizes are multiples of the tiles', and each layer's input has the size of the outputs before
  // it.
  bool (*fits)(const Torso&);
  // How many numbers forward keeps for backward: the outputs of the convolutions, arranged as the next layer's input.
  int64_t (*inner)(const Torso&, int64_t batch);
  // laid: the frames in blocks, with values from 0 to 255. parameters: weight and bias of each layer; a convolution's
  // weight is [filter, row, column, channel].
  bool (*forward)(const Torso&, int64_t batch, const Bf16* laid, const Bf16* const* parameters, Bf16* inner,
                  Bf16* features);
  bool (*backward)(const Torso&, int64_t batch, const Bf16* laid, const Bf16* inner, const Bf16* features,
                   const Bf16* gradient, const Bf16* const* parameters, Bf16* const* gradients, int64_t first);
};

extern const TorsoKernels kTorsoAmx;         // matrix registers
extern const TorsoKernels kTorsoAvx512Bf16;  // AVX512_BF16

}  // namespace murmurate
