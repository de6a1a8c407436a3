// Built for AMX and for AVX512_BF16. The gradient of a layer's outputs is stored on the grid of its inputs, with zeros
// at meaningless outputs and before the first image. So windows may reach across rows and images; and the gradient of
// one block of a filter is a product with this grid, shifted by the block's offset in places from the window's first
// block.
#include "torso_parts.hpp"

namespace murmurate {
namespace {

constexpr int64_t kPacked = 1 << 14;  // numbers that are packed at a time, so that they stay in the nearest cache
constexpr int64_t kPanel = 4 * kDeep;  // columns of the fully connected layer at a time

int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
// Places of a grid: zeros before the first image, and places from the first image on.
int64_t front(const Layer& l) { return round_up((l.kernel - 1) * (l.width + 1), kDeep); }
int64_t image_places(const Layer& l, int64_t batch) { return round_up(batch * grid(l), kDeep); }
// Pairs of a block of the filter and 16 filters.
int64_t combinations(const Layer& l) { return l.kernel * l.kernel * l.filters / kRows; }
int64_t channel_tiles(const Layer& l) { return round_up(l.channels, kDeep) / kRows; }  // tiles of a block's channels

// Places whose blocks are packed at a time.
int64_t places_packed(const Layer& l) {
  return round_up(larger(kPacked / (channel_tiles(l) * kRows), 4 * kDeep), kDeep);
}

// Numbers from one filter's row of gradients to the next: an odd number of cache lines, so that 16 rows do not compete
// for the same few places of the cache.
int64_t row_stride(const Layer& l, int64_t batch) {
  return round_up(front(l) + image_places(l, batch), 2 * kDeep) + kDeep;
}

// Arrays of a backward pass, each large enough for every layer.
struct Backward {
  int64_t *offset, *steps;       // of step_offsets; steps[j] is 32 j, the offsets of contiguous steps
  int32_t* order;                // of filter_order
  int64_t* place;                // position, on the grid of the layer before, of the block at each place
  float *bias, *sums;            // gradient of a bias; sums of products
  Bf16 *by_sample, *by_feature;  // gradient of the fully connected layer's outputs, and its transpose
  Bf16* right;                   // packed right factor
  Bf16* by_filter;               // transposed gradient of a convolution's outputs
  Bf16* grid[Torso::kMost];      // gradient of each convolution's outputs
};

Backward allocate_backward(const Torso& t, int64_t batch, Arena& arena) {
  const int64_t samples = round_up(batch, kDeep);
  int64_t deep = 0, steps = larger(samples, t.features) / kDeep, places = 0, width = t.features, sums = 0;
  int64_t by_filter = 0;
  int64_t right = larger(larger(samples, t.features) * kPanel, kPacked);
  Backward b;
  for (int64_t i = 0; i < t.layers; ++i) {
    const Layer& l = t.layer[i];
    deep = larger(deep, depth(l));
    steps = larger(steps, larger(places_packed(l), l.kernel * l.kernel * l.filters) / kDeep);
    places = larger(places, grid(l));
    width = larger(width, l.filters);
    sums = larger(sums, (combinations(l) + 1) * channel_tiles(l) * kSums);
    by_filter = larger(by_filter, l.filters * row_stride(l, batch));
    right = larger(right, larger(l.filters * depth(l), places_packed(l) * channel_tiles(l) * kRows));
    b.grid[i] = arena.take<Bf16>((front(l) + image_places(l, batch)) * l.filters);
  }
  b.offset = arena.take<int64_t>(steps);
  b.steps = arena.take<int64_t>(steps);
  for (int64_t j = 0; arena.base && j < steps; ++j) b.steps[j] = j * kDeep;
  b.order = arena.take<int32_t>(deep);
  b.place = arena.take<int64_t>(places);
  b.bias = arena.take<float>(width);
  b.sums = arena.take<float>(sums);
  b.by_sample = arena.take<Bf16>(samples * t.features);
  b.by_feature = arena.take<Bf16>(samples * t.features);
  b.right = arena.take<Bf16>(right);
  b.by_filter = arena.take<Bf16>(by_filter);
  return b;
}

// Rounds `count` numbers, a multiple of 16.
void store_rounded(const float* from, int64_t count, Bf16* to) {
  for (int64_t i = 0; i < count; i += kRows) store16(to + i, rounded(_mm512_loadu_ps(from + i)));
}

void clear(void* at, int64_t bytes) { std::memset(at, 0, static_cast<std::size_t>(bytes)); }

void add_to(float* at, __m512 x) { _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), x)); }

// Gradient of the features before their ReLU, in both layouts, and the gradient of the bias.
void rectify_gradient(const Torso& t, int64_t batch, const Bf16* features, const Bf16* gradient, const Backward& b,
           Bf16* bias) {
  const int64_t samples = round_up(batch, kDeep);
  for (int64_t k = 0; k < t.features; k += kRows) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t at = i * t.features + k;
      const __m256i passed = _mm256_maskz_mov_epi16(passes_relu(load16(features + at)), load16(gradient + at));
      store16(b.by_sample + at, passed);
      sum = _mm512_add_ps(sum, widened(passed));
    }
    store16(bias + k, rounded(sum));
  }
  clear(b.by_sample + batch * t.features, (samples - batch) * t.features * static_cast<int64_t>(sizeof(Bf16)));
  transpose_numbers(b.by_sample, samples, t.features, b.by_feature, samples);
}

// Gradient of the fully connected layer's weights: features x samples times samples x inputs.
void connected_weight_gradient(const Torso& t, int64_t batch, const Bf16* x, const Backward& b, Bf16* gradient) {
  alignas(64) float sums[4 * kSums];
  const int64_t deep = flat(t), samples = round_up(batch, kDeep), steps = samples / kDeep;
  const Inner inner = {samples, b.steps, steps, 2 * kTile};
  for (int64_t k = 0; k < deep; k += kPanel) {
    const int64_t wide = deep - k < kPanel ? deep - k : kPanel;
    pack_pairs(x + k, deep, batch, wide, steps, b.right);
    compiler_barrier();
    for (int64_t m = 0; m < t.features; m += 2 * kRows)
      for (int64_t column = 0; column < wide; column += kDeep) {
        const Bf16 *left = b.by_feature + m * samples, *right = b.right + column * samples;
        products_2x2(inner, left, left + kRows * samples, right, right + kTile, sums, sums + 2 * kSums);
        for (int64_t i = 0; i < 2 * kRows; ++i) {
          const float* row = sums + i / kRows * 2 * kSums + i % kRows * kRows;
          const __m512i pair = rounded(_mm512_load_ps(row), _mm512_load_ps(row + kSums));
          _mm512_storeu_si512(gradient + (m + i) * deep + k + column, pair);
        }
      }
  }
}

// Gradient of the fully connected layer's inputs: samples x features times features x inputs. Where it passes the
// ReLU, it goes to the grid of the last convolution.
void connected_input_gradient(const Torso& t, int64_t batch, const Bf16* x, const Bf16* weight, const Backward& b) {
  alignas(64) float sums[4 * kSums];
  const Layer& l = last(t);
  const int64_t deep = flat(t), size = grid(l) * l.filters, wide = out_width(l);
  Bf16* grids = b.grid[t.layers - 1] + front(l) * l.filters;
  const Inner inner = {t.features, b.steps, t.features / kDeep, 2 * kTile};
  for (int64_t k = 0; k < deep; k += kDeep) {
    if (k % kPanel == 0) {
      pack_pairs(weight + k, deep, t.features, deep - k < kPanel ? deep - k : kPanel, inner.steps, b.right);
      compiler_barrier();
    }
    const Bf16* right = b.right + k % kPanel * t.features;
    for (int64_t n = 0; n < batch; n += 2 * kRows) {
      const Bf16* left = b.by_sample + n * t.features;
      products_2x2(inner, left, left + kRows * t.features, right, right + kTile, sums, sums + 2 * kSums);
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t column = k + half * kRows, place = column / l.filters, band = column % l.filters;
        Bf16* to = grids + n * size + (place / wide * l.width + place % wide) * l.filters + band;
        const Bf16* output = x + n * deep + column;
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < 2 * kRows && n + i < batch; ++i, to += size, output += deep) {
          const float* row = sums + (i / kRows * 2 + half) * kSums + i % kRows * kRows;
          const __m512 y = _mm512_maskz_loadu_ps(passes_relu(load16(output)), row);
          sum = _mm512_add_ps(sum, y);
          store16(to, rounded(y));
        }
        add_to(b.bias + band, sum);
      }
    }
  }
}

// Gradient of layer i's filters: for each block of a filter, filters x places times places x channels of a block.
void filter_gradient(const Torso& t, int64_t i, int64_t batch, const Bf16* x, const Backward& b, Bf16* gradient) {
  const Layer& l = t.layer[i];
  const int64_t total = batch * grid(l), stride = row_stride(l, batch), tiles = channel_tiles(l);
  const int64_t count = combinations(l), bands = l.filters / kRows;
  transpose_numbers(b.grid[i], front(l) + image_places(l, batch), l.filters, b.by_filter, stride);
  clear(b.sums, count * tiles * kSums * static_cast<int64_t>(sizeof(float)));
  // the left factor of a combination
  const auto left = [&](int64_t combination) {
    const int64_t block = combination / bands, back = block / l.kernel * l.width + block % l.kernel;
    return b.by_filter + combination % bands * kRows * stride + front(l) - back;
  };
  const int64_t places_at_once = places_packed(l);
  for (int64_t place = 0; place < total; place += places_at_once) {
    const int64_t rest = total - place, steps = round_up(rest < places_at_once ? rest : places_at_once, kDeep) / kDeep;
    const Inner inner = {stride, b.steps, steps, 2 * kTile};
    pack_pairs(x + place * l.channels, l.channels, rest, l.channels, steps, b.right);
    compiler_barrier();
    for (int64_t tile = 0; tile < tiles; tile += tiles % 4 ? 2 : 4) {
      const Bf16* right = b.right + tile * steps * kTile;
      for (int64_t k = 0; k < count; k += tiles % 4 ? 2 : 1) {
        float* sums = b.sums + (k * tiles + tile) * kSums;
        const Bf16* a = left(k) + place;
        if (tiles % 4 == 0)
          products_1x4(inner, a, right, 2 * steps * kTile, sums);
        else  // if the last combination has no partner, the second result goes to the space after all others
          products_2x2(inner, a, k + 1 < count ? left(k + 1) + place : a, right, right + kTile, sums,
                       sums + tiles * kSums, true);
      }
    }
  }
  filter_order(l, i == 0, b.order);
  const __m512 scale = _mm512_set1_ps(i ? 1.0f : kPixel);
  const int64_t deep = depth(l);
  for (int64_t k = 0; k < count; ++k)
    for (int64_t c = 0; c < l.channels; c += kRows)
      for (int64_t row = 0; row < kRows; ++row) {
        const float* at = b.sums + (k * tiles + c / kRows) * kSums + row * kRows;
        const int32_t* order = b.order + k / bands * l.channels + c;
        alignas(32) Bf16 numbers[kRows];
        store16(numbers, rounded(_mm512_mul_ps(_mm512_loadu_ps(at), scale)));
        Bf16* to = gradient + (k % bands * kRows + row) * deep;
        for (int64_t n = 0; n < kRows; ++n) to[order[n]] = numbers[n];
      }
}

// Packs filters, rotated by 180 degrees, as a right factor: window of gradients x channels of a block.
void pack_rotated(const Layer& l, const Bf16* weight, const int32_t* order, Bf16* to) {
  const int64_t deep = depth(l), blocks = l.kernel * l.kernel;
  for (int64_t n = 0; n < l.channels; n += kRows)
    for (int64_t block = blocks - 1; block >= 0; --block)
      for (int64_t o = 0; o < l.filters; o += 2)
        for (int64_t c = n; c < n + kRows; ++c) {
          const int32_t at = order[block * l.channels + c];
          *to++ = weight[o * deep + at];
          *to++ = weight[(o + 1) * deep + at];
        }
}

// Gradient of the inputs of layer i > 0; call it after filter_gradient, whose b.order it uses. Where the gradient
// passes the ReLU, it goes to the grid of the layer before.
void input_gradient(const Torso& t, int64_t i, int64_t batch, const Bf16* x, const Bf16* weight, const Backward& b) {
  const Layer &l = t.layer[i], &before = t.layer[i - 1];
  const int64_t places = grid(l), size = grid(before) * before.filters;
  pack_rotated(l, weight, b.order, b.right);
  compiler_barrier();
  for (int64_t p = 0; p < places; ++p)
    b.place[p] = (p / l.width * l.block * before.width + p % l.width * l.block) * before.filters;
  Bf16* to = b.grid[i - 1] + front(before) * before.filters;
  const int64_t* place = b.place;
  float* bias = b.bias;
  const int64_t steps = step_offsets(l.kernel, l.kernel * l.filters, l.width * l.filters, b.offset);
  const Bf16* first_window = b.grid[i] + (front(l) - (l.kernel - 1) * (l.width + 1)) * l.filters;
  multiply_windows({first_window, batch * places, {l.filters, b.offset, steps, kTile}, b.right, l.channels / kRows},
           [=, &l, &before](int64_t first, int64_t skip, int64_t tile, const float* sums) {
             const int64_t channel = tile * kRows, pixel = channel / before.filters, band = channel % before.filters;
             const int64_t shift = (pixel / l.block * before.width + pixel % l.block) * before.filters + band;
             const int64_t channels = l.channels;
             __m512 sum = _mm512_setzero_ps();
             int64_t at = (first + skip) % places;
             Bf16* image = to + (first + skip) / places * size + shift;
             for (int64_t row = skip; row < kRows; ++row) {
               const __mmask16 passes = passes_relu(load16(x + (first + row) * channels + channel));
               const __m512 y = _mm512_maskz_mov_ps(passes, _mm512_load_ps(sums + row * kRows));
               sum = _mm512_add_ps(sum, y);
               store16(image + place[at], rounded(y));
               const bool image_done = ++at == places;
               at = image_done ? 0 : at;
               image += image_done ? size : 0;
             }
             add_to(bias + band, sum);
           });
}

}  // namespace

bool MURMURATE_TILES::backward(const Torso& t, int64_t batch, const Bf16* laid, const Bf16* inner,
                               const Bf16* features, const Bf16* gradient, const Bf16* const* parameters,
                               Bf16* const* to, int64_t first) {
  Arena measured = {nullptr, 0};
  allocate_backward(t, batch, measured);
  Arena arena = {MURMURATE_TILES::scratch_of(measured.used), 0};
  if (!arena.base) return false;
  const Backward b = allocate_backward(t, batch, arena);
  const Bf16* x[Torso::kMost + 1] = {laid};  // inputs of each layer
  for (int64_t i = 0; i < t.layers; ++i) {
    const Layer& l = t.layer[i];
    x[i + 1] = inner;
    inner += round_up(batch * outputs(t, i), kDeep);
    clear(b.grid[i], (front(l) + image_places(l, batch)) * l.filters * static_cast<int64_t>(sizeof(Bf16)));
  }
  const TileConfig tiles;
  rectify_gradient(t, batch, features, gradient, b, to[2 * t.layers + 1]);
  compiler_barrier();
  connected_weight_gradient(t, batch, x[t.layers], b, to[2 * t.layers]);
  if (first == t.layers) return true;
  clear(b.bias, last(t).filters * static_cast<int64_t>(sizeof(float)));
  connected_input_gradient(t, batch, x[t.layers], parameters[2 * t.layers], b);
  for (int64_t i = t.layers - 1; i >= first; --i) {
    store_rounded(b.bias, t.layer[i].filters, to[2 * i + 1]);
    filter_gradient(t, i, batch, x[i], b, to[2 * i]);
    if (i == first) break;
    clear(b.bias, t.layer[i - 1].filters * static_cast<int64_t>(sizeof(float)));
    input_gradient(t, i, batch, x[i], parameters[2 * i], b);
  }
  return true;
}

}  // namespace murmurate
