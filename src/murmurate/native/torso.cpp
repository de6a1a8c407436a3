// Built for AMX and for AVX512_BF16. Left factors are read in place, and right factors are packed (see tiles.hpp). The
// right factor is the smaller one: the filters of a convolution, and the batch in the fully connected layer.
#include <cstdlib>

#include "torso_parts.hpp"

namespace murmurate {
namespace {

class Scratch {
 public:
  ~Scratch() { _mm_free(base_); }
  char* of(int64_t bytes) {
    if (bytes > bytes_) {
      _mm_free(base_);
      base_ = static_cast<char*>(_mm_malloc(static_cast<std::size_t>(bytes), kBytes));
      bytes_ = base_ ? bytes : 0;
    }
    return base_;
  }

 private:
  char* base_ = nullptr;
  int64_t bytes_ = 0;
};

thread_local Scratch scratch;

// Packs the filters as a right factor: window x filter.
void pack_filters(const Layer& l, const Bf16* weight, const int32_t* order, Bf16* to) {
  const int64_t deep = depth(l);
  for (int64_t n = 0; n < l.filters; n += kRows)
    for (int64_t k = 0; k < deep; k += 2)
      for (int64_t o = n; o < n + kRows; ++o) {
        *to++ = weight[o * deep + order[k]];
        *to++ = weight[o * deep + order[k + 1]];
      }
}

void widen(const Bf16* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kRows) _mm512_storeu_ps(to + i, widened(load16(from + i)));
}

// place[p] <- position of the outputs of place p of layer i in its image; -1 if they are meaningless or never read
void output_places(const Torso& t, int64_t i, int32_t* place) {
  const Layer& l = t.layer[i];
  const bool has_next = i + 1 < t.layers;
  const Layer next = has_next ? t.layer[i + 1] : Layer{out_height(l), out_width(l), l.filters, 1, 0, 1};
  const int64_t s = next.block;
  for (int64_t y = 0; y < l.height; ++y)
    for (int64_t x = 0; x < l.width; ++x) {
      const bool is_read = y < s * next.height && x < s * next.width;
      const int64_t block = (y / s * next.width + x / s) * next.channels;
      *place++ = is_read ? static_cast<int32_t>(block + (y % s * s + x % s) * l.filters) : -1;
    }
}

// Arrays of a forward pass, each large enough for every layer.
struct Forward {
  int64_t* offset;         // of step_offsets
  int32_t *order, *place;  // of filter_order and output_places
  float* bias;
  Bf16* right;             // packed right factor
};

Forward allocate_forward(const Torso& t, int64_t batch, Arena& arena) {
  int64_t steps = flat(t) / kDeep, places = 0, deep = 0, width = t.features;
  int64_t right = round_up(batch, kRows) * flat(t);
  for (int64_t i = 0; i < t.layers; ++i) {
    const Layer& l = t.layer[i];
    if (depth(l) > deep) deep = depth(l);
    if (grid(l) > places) places = grid(l);
    if (l.filters > width) width = l.filters;
    if (depth(l) * l.filters > right) right = depth(l) * l.filters;
  }
  if (deep / kDeep > steps) steps = deep / kDeep;
  return {arena.take<int64_t>(steps), arena.take<int32_t>(deep), arena.take<int32_t>(places),
          arena.take<float>(width), arena.take<Bf16>(right)};
}

void convolve(const Torso& t, int64_t i, int64_t batch, const Bf16* x, const Bf16* weight, const Bf16* bias,
              const Forward& f, Bf16* out) {
  const Layer& l = t.layer[i];
  const int64_t places = grid(l), size = outputs(t, i);
  const float scale = i ? 1.0f : kPixel;
  filter_order(l, i == 0, f.order);
  pack_filters(l, weight, f.order, f.right);
  output_places(t, i, f.place);
  widen(bias, l.filters, f.bias);
  compiler_barrier();
  const int64_t steps = step_offsets(l.kernel, l.kernel * l.channels, l.width * l.channels, f.offset);
  // ends with the last meaningful place, so that no window reaches beyond the last image
  const int64_t used_places = (batch - 1) * places + (out_height(l) - 1) * l.width + out_width(l);
  const __m512 times = _mm512_set1_ps(scale);
  const int32_t* place = f.place;
  const float* add = f.bias;
  multiply_windows({x, used_places, {l.channels, f.offset, steps, kTile}, f.right, l.filters / kRows},
           [=](int64_t first, int64_t skip, int64_t tile, const float* sums) {
             const __m512 bias = _mm512_loadu_ps(add + tile * kRows);
             int64_t at = (first + skip) % places;
             Bf16* image = out + (first + skip) / places * size + tile * kRows;
             for (int64_t row = skip; row < kRows; ++row) {
               const __m512 y = _mm512_fmadd_ps(_mm512_load_ps(sums + row * kRows), times, bias);
               if (place[at] >= 0) store16(image + place[at], rounded(rectified(y)));
               const bool image_done = ++at == places;
               at = image_done ? 0 : at;
               image += image_done ? size : 0;
             }
           });
}

// The fully connected layer: weights are the left factor, in place, and the batch is the right one; results are
// transposed.
void connect(const Torso& t, int64_t batch, const Bf16* x, const Bf16* weight, const Bf16* bias, const Forward& f,
             Bf16* out) {
  alignas(64) float sums[4 * kSums];
  const int64_t deep = flat(t), steps = deep / kDeep, tile_stride = steps * kTile;
  for (int64_t n = 0; n < batch; n += kRows)
    pack_columns(x + n * deep, deep, batch - n < kRows ? batch - n : kRows, steps, f.right + n / kRows * tile_stride);
  widen(bias, t.features, f.bias);
  compiler_barrier();
  step_offsets(1, deep, 0, f.offset);
  const Inner inner = {deep, f.offset, steps, kTile};
  for (int64_t n = 0; n < batch; n += 2 * kRows) {
    const Bf16* b = f.right + n / kRows * tile_stride;
    const bool has_second = n + kRows < batch;
    for (int64_t m = 0; m < t.features; m += 2 * kRows) {
      const Bf16* a = weight + m * deep;
      products_2x2(inner, a, a + kRows * deep, b, has_second ? b + tile_stride : b, sums, sums + 2 * kSums);
      for (int64_t part = 0; part < 4; ++part) {
        const int64_t sample = n + part % 2 * kRows, feature = m + part / 2 * kRows;
        if (sample >= batch) continue;
        __m512i r[16];
        for (int64_t i = 0; i < kRows; ++i) r[i] = _mm512_load_si512(sums + part * kSums + i * kRows);
        transpose(r);
        const __m512 add = _mm512_loadu_ps(f.bias + feature);
        for (int64_t i = 0; i < kRows && sample + i < batch; ++i) {
          const __m512 y = _mm512_add_ps(_mm512_castsi512_ps(r[i]), add);
          store16(out + (sample + i) * t.features + feature, rounded(rectified(y)));
        }
      }
    }
  }
}

bool fits(const Torso& t) {
  for (int64_t i = 0; i < t.layers; ++i) {
    const Layer& l = t.layer[i];
    if (l.kernel < 1 || l.block < 1 || l.filters < 1 || l.height < l.kernel || l.width < l.kernel) return false;
    if (l.filters % kRows || l.channels % kRows || l.kernel * l.channels % kDeep) return false;
    if ((out_height(l) - 1) * l.width + out_width(l) < kRows) return false;  // no tile of places in an image
    if (i == 0) continue;
    const Layer& before = t.layer[i - 1];
    if (l.kernel * l.filters % kDeep || l.channels != l.block * l.block * before.filters) return false;
    if (l.height != out_height(before) / l.block || l.width != out_width(before) / l.block) return false;
  }
  return t.features > 0 && t.features % kDeep == 0 && flat(t) % kDeep == 0;
}

int64_t inner_numbers(const Torso& t, int64_t batch) {
  int64_t numbers = 0;
  for (int64_t i = 0; i < t.layers; ++i) numbers += round_up(batch * outputs(t, i), kDeep);
  return numbers;
}

bool forward(const Torso& t, int64_t batch, const Bf16* laid, const Bf16* const* parameters, Bf16* inner,
             Bf16* features) {
  Arena measured = {nullptr, 0};
  allocate_forward(t, batch, measured);
  Arena arena = {MURMURATE_TILES::scratch_of(measured.used), 0};
  if (!arena.base) return false;
  const Forward f = allocate_forward(t, batch, arena);
  const TileConfig tiles;
  const Bf16* x = laid;
  for (int64_t i = 0; i < t.layers; ++i) {
    convolve(t, i, batch, x, parameters[2 * i], parameters[2 * i + 1], f, inner);
    x = inner;
    inner += round_up(batch * outputs(t, i), kDeep);
  }
  connect(t, batch, x, parameters[2 * t.layers], parameters[2 * t.layers + 1], f, features);
  return true;
}

}  // namespace

char* MURMURATE_TILES::scratch_of(int64_t bytes) { return scratch.of(bytes); }

const TorsoKernels MURMURATE_TORSO = {MURMURATE_NAME, fits,     inner_numbers, forward, MURMURATE_TILES::backward};

}  // namespace murmurate
